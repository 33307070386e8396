"""Machines that are taken away: SIGTERM, on one process or on many."""

import itertools

import jax

_asked = itertools.count(1)  # over all loops of a process, since the step that is agreed on is never one of the past


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
