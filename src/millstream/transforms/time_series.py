"""Batches of sequences."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from millstream.pipeline.transform import Transform
from millstream.reading.contracts import PyTree
from millstream.text.errors import require_choice, require_text
from millstream.text.summaries import call_text
from millstream.transforms.rename import require_keys


@dataclasses.dataclass(frozen=True)
class TimeSeriesBatchTransform(Transform):
    """Give a batch of sequences the shape a recurrent network wants: (batch, time, features).

    Example:
        >>> source = ms.ArraySampleSource({"context": np.zeros((100, 24, 3)), "target": np.zeros((100, 1))})
        >>> loader = ms.DataLoader([source, ms.BatchTransform(32), ms.transforms.TimeSeriesBatchTransform()])
        >>> loader.element_spec()["context"].shape
        (32, 24, 3)

    Args:
        sequence_key: Which value of the batch holds the sequences, shape (batch, time, ...). Trailing axes become
            one axis of features; without any there is one feature.
        mode: "batched" leaves one row per sequence. "packed" lays all sequences one after the other, shape
            (batch * time, features), marks where each starts, and repeats the mask for every time step; the other
            values of the batch stay as they are.
        sequence_start_key: The name of the marks in packed mode: bool, True in the first row of every sequence that
            is not padding.
    """

    sequence_key: str = "context"
    mode: Literal["batched", "packed"] = "batched"
    sequence_start_key: str = "sequence_start"

    def __post_init__(self) -> None:
        for name in ("sequence_key", "sequence_start_key"):
            require_text("TimeSeriesBatchTransform", name, getattr(self, name))
        require_choice("TimeSeriesBatchTransform", "mode", self.mode, ("batched", "packed"))

    def apply(self, value: PyTree, mask: jax.Array, key: jax.Array | None) -> tuple[PyTree, jax.Array]:
        require_keys("TimeSeriesBatchTransform", value, [self.sequence_key])
        sequences = value[self.sequence_key]
        if mask.ndim != 1 or sequences.ndim < 2:
            raise ValueError(
                "TimeSeriesBatchTransform needs one batch of sequences, shape (batch, time, ...). "
                f"Got {self.sequence_key!r} of shape {sequences.shape} with a mask of shape {mask.shape}. "
                "Put it after one BatchTransform."
            )
        batch, time = sequences.shape[:2]
        features = math.prod(sequences.shape[2:])
        if self.mode == "batched":
            return {**value, self.sequence_key: sequences.reshape(batch, time, features)}, mask
        if self.sequence_start_key in value:
            raise ValueError(
                f"TimeSeriesBatchTransform would overwrite the value {self.sequence_start_key!r} of the batch. "
                "Choose another sequence_start_key, or rename the value first."
            )
        packed = {
            **value,
            self.sequence_key: sequences.reshape(batch * time, features),
            self.sequence_start_key: (mask[:, None] & (np.arange(time) == 0)[None, :]).reshape(-1),
        }
        return packed, jnp.repeat(mask, time)

    def __repr__(self) -> str:
        return call_text(self)
