"""Machines that are taken away: SIGTERM, on one process or on many."""

import itertools
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from millstream.loops.loop_state import LoopOutput
    from millstream.reading.contracts import PyTree

_STATUS = 128 + 15  # what a shell calls a process that SIGTERM has ended

_asked = itertools.count(1)  # over all loops of a process, since the step that is agreed on is never one of the past


class Preempted(SystemExit):
    """SIGTERM has ended a loop, after everything was saved: left alone, it ends the program with status 143.

    Example:
        >>> try:
        ...     raise ms.Preempted(None)
        ... except ms.Preempted as preempted:
        ...     preempted.code
        143

    Attributes:
        loop_output: What the loop would have returned.
    """

    def __init__(self, loop_output: "LoopOutput[PyTree]") -> None:
        super().__init__(_STATUS)
        self.loop_output = loop_output


class PreemptionPoint:
    """The step after which all processes of a run stop, once SIGTERM has come to one of them.

    JAX's own service listens for the signal and agrees on a step; every process asks it once per step.
    """

    @classmethod
    def of_several_processes(cls) -> "PreemptionPoint | None":
        """One if there are several processes; None if this one is alone and can listen for itself."""
        return cls() if jax.process_count() > 1 else None

    def reached(self) -> bool:
        """Whether to stop here; to be asked by all processes, equally often."""
        from jax.experimental import multihost_utils

        return multihost_utils.reached_preemption_sync_point(next(_asked))
