"""Why some options are best, in a few sentences with the figures that were measured."""

import math

from millstream.loader._tuning.result import executor_code
from millstream.loader._tuning.stages import TimedReading
from millstream.loader._tuning.trials import Executor, TriedOptions
from millstream.reading.in_graph import InGraph
from millstream.reading.processes import Processes
from millstream.reading.threads import Threads
from millstream.text.tables import time_text

_LOCKED = 1.25  # two threads that read less than this as much as one hold each other up


def reason(
    chosen: TriedOptions, present: TriedOptions | None, tried: list[TriedOptions], reading: TimedReading | None
) -> str:
    """The sentences.

    Args:
        chosen: The options that are best.
        present: Those that the loader has now, if they were tried.
        tried: All that were tried.
        reading: What reading costs in one thread, if samples are read on the host.
    """
    known = [row for row in tried if row.samples_per_second is not None and row.executor != chosen.executor]
    sentences = [] if reading is None else [_reading_words(reading), *_lock_words(tried)]
    sentences.append(_gain_words(chosen, present))
    for kind in (InGraph, Threads, Processes):
        rows = [row for row in known if isinstance(row.executor, kind) and row is not present]
        if isinstance(chosen.executor, kind):
            rows = [row for row in rows if _workers(row) > _workers(chosen)]
        if rows:
            other = max(rows, key=lambda row: row.samples_per_second or 0.0)
            sentences.append(f"{_name(other.executor)} gave {_ratio(other, chosen)} of that.")
    sentences += _prefetch_words(chosen, tried)
    return " ".join(sentences)


def _name(executor: Executor) -> str:
    return "no executor" if executor is None else executor_code(executor).removeprefix("ms.")


def _workers(row: TriedOptions) -> int:
    return getattr(row.executor, "workers", 0)


def _ratio(row: TriedOptions, other: TriedOptions) -> str:
    return f"{(row.samples_per_second or 0.0) / (other.samples_per_second or math.inf):.2f}x"


def _reading_words(reading: TimedReading) -> str:
    work = min(reading.per_sample, reading.cpu_seconds / max(1, reading.samples))
    how = "all of it at work" if work > 0.9 * reading.per_sample else f"at work for {time_text(work)} of them"
    return f"Reading takes {time_text(reading.per_sample)} per sample in one thread, {how}."


def _lock_words(tried: list[TriedOptions]) -> list[str]:
    """What a second thread brings tells how much of the reading keeps the interpreter's lock."""
    rates = {row.executor.workers: row for row in tried if isinstance(row.executor, Threads)}
    one, two = rates.get(1), rates.get(2)
    if one is None or two is None or one.samples_per_second is None or two.samples_per_second is None:
        return []
    locked = two.samples_per_second < _LOCKED * one.samples_per_second
    why = ": it keeps the interpreter's lock, or the cores are busy" if locked else ""
    return [f"2 threads read {_ratio(two, one)} as much as 1{why}."]


def _gain_words(chosen: TriedOptions, present: TriedOptions | None) -> str:
    name = _name(chosen.executor)
    idle = "" if chosen.idle is None else f", and the loop waits {chosen.idle:.0%} of its time"
    words = f"{name[0].upper()}{name[1:]} gives {chosen.samples_per_second:,.0f} samples/s{idle}"
    if present is None or present.samples_per_second is None:
        return f"{words}."
    if present.executor == chosen.executor:
        return f"{words}: that is what the loader has now."
    waits = "" if present.idle is None else f", where it waits {present.idle:.0%}"
    return f"{words}: {_ratio(chosen, present)} of the present {_name(present.executor)}{waits}."


def _prefetch_words(chosen: TriedOptions, tried: list[TriedOptions]) -> list[str]:
    same = [row for row in tried if row.executor == chosen.executor and row.prefetch != chosen.prefetch]
    others = [f"prefetch={row.prefetch} gave {_ratio(row, chosen)}" for row in same]
    return [f"Compared with prefetch={chosen.prefetch}, {' and '.join(others)}."] if others else []
