"""Text to tokens in Arrow files, once, by two processes.

A byte-level BPE of Hugging Face's `tokenizers` with 8,000 tokens, trained on made text. Millstream reads lines of JSON,
calls the tokenizer for 1,000 documents at once, writes shards with an index, and compares their checksums at the end:
with the tokenizer as the documents recommend it, `ms.tokenizers.Tokenizer`, and with the very call that
`datasets.map(num_proc=2, batched=True)` makes, too. That starts from a dataset that is in Arrow already, or from the
same lines. The start of the processes counts for all. `MEGABYTES=1000` takes 1 GB of text in place of 50 MB.
"""

import functools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable

from _case import Options, main
from _fresh import fresh
from _measure import Entry, Run, measured
from _result import Table
from _texts import train_tokenizer, write_texts

OURS, SAME_CALL = "Millstream, prepare", "Millstream, prepare, the same call"
THEIRS, FROM_LINES = "datasets.map", "datasets, lines to Arrow, then map"


def program(folder: pathlib.Path, function: str, leaves: str) -> Run:
    """A round in a process of its own, which finds nothing of an earlier one."""
    run: Callable[[], object] = fresh(f"import _texts; _texts.{function}({str(folder)!r})")

    def clean() -> object:
        shutil.rmtree(folder / leaves, ignore_errors=True)
        return run()

    return clean


def measure(options: Options) -> list[Table]:
    megabytes = float(os.environ.get("MEGABYTES", options.size(50, 1)))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_texts(folder / "texts.jsonl", megabytes)
        train_tokenizer(folder / "texts.jsonl", folder / "tokenizer.json")
        entries = [
            Entry(OURS, functools.partial(program, folder, "by_prepare_and_adapter", "prepared"), "millstream"),
            Entry(SAME_CALL, functools.partial(program, folder, "by_prepare", "prepared"), "millstream"),
            Entry(THEIRS, functools.partial(program, folder, "by_map", "datasets"), "datasets"),
            Entry(FROM_LINES, functools.partial(program, folder, "by_map_from_lines", "datasets"), "datasets"),
        ]
        table = measured(f"{megabytes:g} MB of text", "s", OURS, entries, options.rounds(3))
    for ours, how in ((OURS, ""), (SAME_CALL, ", the same call")):
        table.hold(f"of the speed of datasets.map{how}", table.ratio(THEIRS, ours), at_least=1)
        table.hold(f"of the speed of datasets from the same lines{how}", table.ratio(FROM_LINES, ours), at_least=1)
    return [table]


if __name__ == "__main__":
    main(measure)
