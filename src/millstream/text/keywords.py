"""Answers to keywords that a function does not have, above all those of other libraries.

Type checkers and `inspect.signature` see the function as it is written: nothing is added to its signature.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from millstream.text.errors import describe_value, did_you_mean, table

F = TypeVar("F", bound=Callable[..., Any])

_BATCH_SIZE = "batching is a stage: DataLoader([source, ms.BatchTransform({value})])"
_ORDER = 'the source decides the order: ordering="shuffle" (its default) or ordering="sequential"'
_WORKERS = "write executor=ms.Processes(4), or ms.Threads(4)"
_KEY = "the key comes with the state: loader.init_state(jax.random.key(0))"
_STAGE = "it is a stage of the list: DataLoader([source, ms.MapTransform(fn), ms.BatchTransform(32)])"
_PREFETCH = "write prefetch={value}, in batches"
_EPOCHS = "write stop=ms.at(epochs={value})"
_STEPS = "write stop={value}, a number of steps"
_LOOP = "a loop decides how long it runs: ms.train_loop(..., stop=ms.at(epochs=2))"
_TEST = "write test_dataset=..., and give tasks an ms.on_test_step"
_TEST_STEP = "steps are tasks: {{ms.on_train_step: train_step, ms.on_test_step: test_step}}"
_SEED = "write key=jax.random.key(0)"
_YOURS = "the step that you write has it: tasks={{ms.on_train_step: train_step}}"
_CALLBACKS = "write callbacks=[...], with progress bars, loggers, early stopping and checkpoints"
_TASKS = "callbacks are tasks: {{ms.every(1): [train_step, callback]}}"
_BATCHES = "the loader makes the batches: ms.DataLoader([source, ms.BatchTransform({value})])"
_DIRECTORY = "write directory={value}"
_BEST = 'write best=1, monitor="loss_test"'
_DROP_LAST = "write ms.BatchTransform(32, drop_last=True)"

_LOADER = {
    **dict.fromkeys(("batch_size", "batch", "bs"), _BATCH_SIZE),
    **dict.fromkeys(("shuffle", "sampler", "batch_sampler", "ordering", "order"), _ORDER),
    **dict.fromkeys(("num_workers", "workers", "worker_count", "num_threads", "num_parallel_calls"), _WORKERS),
    **dict.fromkeys(("seed", "generator", "rng", "key", "random_state"), _KEY),
    **dict.fromkeys(("transform", "transforms", "operations", "map_fn", "preprocess"), _STAGE),
    **dict.fromkeys(("prefetch_factor", "prefetch_size", "buffer_size", "prefetch_buffer_size"), _PREFETCH),
    **dict.fromkeys(("epochs", "num_epochs", "repeat"), _LOOP),
    **dict.fromkeys(("drop_last", "drop_remainder"), _DROP_LAST),
    **dict.fromkeys(("dataset", "source", "data", "data_source"), "it comes first: DataLoader([source, ...])"),
    **dict.fromkeys(("mesh", "devices", "num_shards"), "write sharding=mesh, a jax.sharding.Mesh with an axis 'data'"),
    **dict.fromkeys(("collate_fn", "collate"), "write ms.BatchTransform(32, collate=fn)"),
    "pin_memory": "leave it out; batches are put on the device as they are made",
    "persistent_workers": "workers stay from epoch to epoch inside a block: with loader: ...",
}
_RUN = {
    **dict.fromkeys(("steps", "num_steps", "max_steps", "total_steps", "n_steps", "num_train_steps"), _STEPS),
    **dict.fromkeys(("callback", "logger", "loggers", "progress", "progress_bar", "verbose"), _CALLBACKS),
    **dict.fromkeys(("seed", "rng", "rngs", "random_state"), _SEED),
    **dict.fromkeys(("batch_size", "batch"), _BATCHES),
    **dict.fromkeys(("shuffle",), _ORDER),
    **dict.fromkeys(("num_workers", "workers"), "the loader reads: ms.DataLoader(..., executor=ms.Processes(4))"),
    **dict.fromkeys(("model", "params", "train_state"), "the state comes first: {caller}(state, dataset, tasks)"),
    **dict.fromkeys(("x", "data", "loader", "train_data"), "the dataset comes second: {caller}(state, dataset, tasks)"),
    **dict.fromkeys(("loss", "loss_fn", "optimizer", "metrics"), _YOURS),
}
_TRAINING = {
    **_RUN,
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs", "n_epochs", "epoch"), _EPOCHS),
    **dict.fromkeys(("validation_data", "val_data", "val_dataset", "val_loader", "validation_loader"), _TEST),
    **dict.fromkeys(
        ("valid_dataset", "eval_dataset", "eval_data", "test_data", "test_loader", "val_dataloaders"), _TEST
    ),
    **dict.fromkeys(("train_step", "on_train_step", "step", "step_fn", "test_step", "on_test_step"), _TEST_STEP),
    **dict.fromkeys(("steps_per_epoch", "epoch_length", "epoch_steps"), "write epoch_duration={value}"),
    **dict.fromkeys(("validation_steps", "limit_val_batches", "test_steps"), "write test_duration={value}"),
    **dict.fromkeys(("ckpt_path", "resume_from", "resume_from_checkpoint"), "write resume={value}"),
    **dict.fromkeys(("overfit_batches", "limit_train_batches"), "write limit_batches={value}"),
    "initial_epoch": "write resume= with the directory of an ms.checkpoint; a run continues where it was",
}
_SOURCE = {
    **dict.fromkeys(("shuffle", "sampler"), 'write ordering="shuffle" (the default) or ordering="sequential"'),
    **dict.fromkeys(("seed", "rng", "key", "generator"), _KEY),
    **dict.fromkeys(("batch_size", "batch"), _BATCH_SIZE),
    **dict.fromkeys(("transform", "transforms", "map_fn"), _STAGE),
    **dict.fromkeys(("num_workers", "workers", "num_threads"), "write DataLoader(..., executor=ms.Processes(4))"),
}
_FOREIGN: dict[str, dict[str, str]] = {
    "DataLoader": _LOADER,
    "train_loop": _TRAINING,
    "test_loop": _RUN,
    "predict_loop": _RUN,
    "loop": {
        **_RUN,
        **dict.fromkeys(("epochs", "num_epochs", "max_epochs"), _EPOCHS),
        **dict.fromkeys(("callbacks", "callback", "logger", "loggers", "progress", "progress_bar", "verbose"), _TASKS),
    },
    "ArraySampleSource": _SOURCE,
    "DatasetSource": {**_SOURCE, "collate_fn": "write ms.BatchTransform(32, collate=fn)"},
    "DiskSampleSource": _SOURCE,
    "IterableSource": {
        **dict.fromkeys(("buffer_size", "shuffle_buffer_size", "shuffle", "buffer"), "write shuffle_buffer=10_000"),
        **dict.fromkeys(("size", "num_samples", "steps_per_epoch"), "write length=n, the number of samples in a pass"),
        **dict.fromkeys(("seed", "rng", "key", "generator"), _KEY),
        **dict.fromkeys(("batch_size", "batch"), _BATCH_SIZE),
        **dict.fromkeys(("transform", "transforms", "map_fn"), _STAGE),
        **dict.fromkeys(("num_workers", "workers"), "threads call host stages: ms.HostMapTransform(fn, readers=4)"),
    },
    "BatchTransform": {
        **dict.fromkeys(("shuffle", "seed"), _ORDER),
        **dict.fromkeys(("collate_fn", "batch_fn"), "write collate=fn"),
        **dict.fromkeys(("drop_remainder",), "write drop_last={value}"),
        **dict.fromkeys(("size", "n"), "write batch_size={value}"),
        **dict.fromkeys(("num_workers", "workers"), "write DataLoader(..., executor=ms.Processes(4))"),
    },
    "early_stopping": {
        **dict.fromkeys(("metric", "name"), "write monitor={value}"),
        **dict.fromkeys(("restore_best", "restore_best_state"), "write restore_best_weights={value}"),
        **dict.fromkeys(("start_from_epoch", "warmup"), "write start_from=ms.at(epochs={value})"),
        **dict.fromkeys(("verbose",), "leave it out; the loop's output says why it ended: output.reason"),
    },
    "checkpoint": {
        **dict.fromkeys(("filepath", "path", "dirpath", "folder", "checkpoint_dir"), _DIRECTORY),
        **dict.fromkeys(("save_best_only", "save_top_k", "best_fn"), _BEST),
        **dict.fromkeys(("max_to_keep", "keep_last", "keep_n"), "write keep={value}"),
        **dict.fromkeys(
            ("every", "every_n_epochs", "save_freq"),
            "a schedule says when: tasks={{ms.every(100): ms.checkpoint(...)}}",
        ),
    },
}
_EXAMPLES = {
    "DataLoader": ["Write DataLoader([source, ms.BatchTransform(32)])."],
    "iterate": ["Write loader.iterate(loader.init_state(jax.random.key(0)))."],
    "train_loop": [
        "Write ms.train_loop(state, loader, {ms.on_train_step: train_step}, stop=ms.at(epochs=2), "
        "key=jax.random.key(0))."
    ],
}
_BY_POSITION = {
    "DataLoader": "Source and stages are one list: DataLoader([source, ms.BatchTransform(8)]).",
    "ArraySampleSource": 'Several arrays are one tree: ArraySampleSource({"x": x, "y": y}).',
}


def answer_keywords(door: F) -> F:
    """Have a function or a class say what to write in place of arguments that it does not have.

    Args:
        door: A function or a class without `*args` and `**kwargs`. What its arguments are is found out once, here.
    """
    if not isinstance(door, type):
        return _answering(door.__name__, door)
    setattr(door, "__init__", _answering(door.__name__, door.__init__))  # noqa: B010
    return door  # pyright: ignore[reportReturnType]


def _answering(caller: str, fn: Callable[..., Any]) -> Any:
    parameters = inspect.signature(fn).parameters
    known = frozenset(parameters)
    most = sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters.values())
    names = [name for name in parameters if name != "self"]
    by_position = ", ".join(names[: most - len(parameters) + len(names)])
    required = [name for name in parameters if parameters[name].default is inspect.Parameter.empty]

    @functools.wraps(fn)
    def call(*arguments: Any, **keywords: Any) -> Any:
        missing = [name for name in required[len(arguments) :] if name not in keywords]
        if known.issuperset(keywords) and len(arguments) <= most and not missing:
            return fn(*arguments, **keywords)
        if len(arguments) > most:
            line = _BY_POSITION.get(caller, "Give the others by name.")
            raise TypeError(f"{caller} takes only ({by_position}) by position. {line}")
        unknown = [name for name in keywords if name not in known]
        if not unknown:
            raise TypeError(" ".join([f"{caller} needs {' and '.join(missing)}.", *_EXAMPLES.get(caller, [])]))
        answers = [(name, _answer(caller, name, keywords[name], names)) for name in unknown]
        if len(answers) > 1:
            raise TypeError(f"{caller} has no arguments of these names:\n{table(answers)}")
        name, answer = answers[0]
        raise TypeError(f"{caller} has no argument {name!r}. {answer[0].upper()}{answer[1:]}")

    return call


def _answer(caller: str, name: str, value: Any, known: list[str]) -> str:
    """What to write in place of a keyword."""
    line = _FOREIGN.get(caller, {}).get(name)
    if line is None:
        return did_you_mean(name, known).strip() or f"It has: {', '.join(known)}."
    shown = describe_value(value).rpartition(" (")[0]
    return f"{line.format(value=shown, caller=caller)}."
