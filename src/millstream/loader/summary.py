"""A loader in one or two lines, and as a small table: its stages, what a batch is, and how many make an epoch."""

from typing import Any

from millstream.pipeline.summary import path_text
from millstream.text.html import html_names
from millstream.text.summaries import leaf_texts, never_raising, value_text

_LINE = 110  # characters; what is longer is written in two lines


@never_raising
def loader_text(loader: Any) -> str:
    """A loader, such as `DataLoader(ArraySampleSource(10 samples) -> BatchTransform(4), batch {x: f32[4]}, ...)`."""
    path = path_text(loader.pipeline)
    specs = loader.element_specs()
    facts = ["Python objects" if specs[0] is None else f"batch {' or '.join(map(value_text, specs))}"]
    facts += [_epoch(loader), *(f"{name}={text}" for name, text in _options(loader))]
    facts += ["sharded"] if loader.options.get("sharding") is not None else []
    one = f"{type(loader).__name__}({path}, {', '.join(facts)})"
    return one if len(one) <= _LINE else f"{type(loader).__name__}({path},\n  {', '.join(facts)})"


def loader_html(loader: Any) -> str:
    """A loader as a table: a line per stage and per array of a batch."""
    specs = loader.element_specs()
    arrays = [" ".join(filter(None, leaf)) for leaf in leaf_texts(specs[0])]
    arrays += [f"or one of {len(specs) - 1:,} other shapes"] if len(specs) > 1 else []
    rows = [
        ("stages", path_text(loader.pipeline).replace(" -> ", "\n")),
        ("batch", "\n".join(arrays) or "Python objects"),
        ("epoch", _epoch(loader).removesuffix(" per epoch")),
    ]
    sharding = loader.options.get("sharding")
    return html_names([*rows, *_options(loader), *([] if sharding is None else [("sharding", "over a mesh")])])


def _epoch(loader: Any) -> str:
    length = loader.steps_per_epoch
    return "epochs of unknown length" if length is None else f"{length:,} step{'' if length == 1 else 's'} per epoch"


def _options(loader: Any) -> list[tuple[str, str]]:
    return [(name, value_text(loader.options[name])) for name in ("executor", "cache") if loader.options.get(name)]
