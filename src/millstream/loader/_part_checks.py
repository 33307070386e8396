"""What loaders that are parts of a larger stream must be."""

from typing import Any

from millstream.loader.loader import DataLoader
from millstream.pipeline.compose import SeekablePipeline
from millstream.pipeline.phased import PhasedPipeline
from millstream.text.errors import describe_value


def require_indexed(caller: str, name: str, loader: Any) -> DataLoader:
    """Refuse a loader that cannot be started at any step, or does not keep to the order of its steps."""
    if not isinstance(loader, DataLoader):
        raise TypeError(f"{caller} needs {name} to be a DataLoader. Got {describe_value(loader)}.")
    if not isinstance(loader.pipeline, SeekablePipeline):
        raise TypeError(
            f"{caller} needs {name} to start with an indexed source, which can be read from any step on. "
            f"Got {type(loader.pipeline).__name__}, a stream, which has to be drawn in order."
        )
    if isinstance(loader.pipeline, PhasedPipeline):
        raise TypeError(
            f"{caller} needs {name} to have epochs of one length, and the batches of this one change at step "
            f"{loader.pipeline.starts[1]:,}. Give the phases to loops by themselves."
        )
    if loader.pipeline.host is not None and not loader.pipeline.host.ordered:
        raise ValueError(
            f"{caller} needs {name} to keep its batches in order, or no step to resume from would be known. "
            "Leave ordered=False out of its executor."
        )
    return loader


def step_limit(loader: DataLoader) -> int:
    """Steps that a state of this loader can count."""
    return loader.pipeline.plan.step_limit


def crosses_epochs(loader: DataLoader) -> bool:
    """Whether batches are completed from the next epoch, which then lacks those samples."""
    plans = loader.pipeline.plan.buckets
    batchings = [batching for plan in plans for batching in plan.batchings]
    return any(batching.ending == "wrap" and batching.inner % batching.size for batching in batchings)
