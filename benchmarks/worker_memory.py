"""Memory of 2 worker processes and their helpers, while they decode pictures.

What the processes have of their own, and what they share with the consumer as memory without a file: the batches. Pages
that several processes have are counted once, in parts.
"""

from _case import Options, main
from _libraries import GRAIN_PROCESSES, PROCESSES, TORCH, Libraries, Stream
from _measure import Entry, Reading, measured
from _result import Table
from _work import make_pictures


def entry(libraries: Libraries, one: Stream, kinds: list[str]) -> Entry:
    """Megabytes of these kinds stand where others have seconds."""

    def run() -> Reading:
        answer = libraries.ask(one, work="pictures", workers=2, how="memory")
        return Reading(sum(answer[kind] for kind in kinds))

    return Entry(one.label, lambda: run, one.package, version=lambda: libraries.version(one))


def measure(options: Options) -> list[Table]:
    streams, tables = [PROCESSES, TORCH, *GRAIN_PROCESSES[:2]], []
    with Libraries(options.also) as libraries:
        make_pictures(libraries.folder)
        for title, kinds in {"Their own": ["own"], "With what they share": ["own", "shared"]}.items():
            entries = [entry(libraries, one, kinds) for one in streams]
            tables.append(measured(title, "MB", PROCESSES.label, entries, options.rounds(3)))
    own = tables[0].median(PROCESSES.label)
    tables[0].hold("MB per worker apart from the batches", None if own is None else own / 2, at_most=60)
    return tables


if __name__ == "__main__":
    main(measure)
