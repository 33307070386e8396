"""Placement on a device."""

import dataclasses
from typing import Any, ClassVar

import jax

from millstream.pipeline.transform import Transform
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value
from millstream.text.summaries import call_text


@dataclasses.dataclass(frozen=True)
class DevicePutTransform(Transform):
    """Deliver batches on a device or over a sharding.

    Batches are made where the source's arrays live and placed when they are handed out, by `iterate` or by
    `next_batch` outside `jax.jit`. Inside your own compiled function, that function decides where its values live.

    Example:
        >>> stage = ms.DevicePutTransform("cpu")

    Args:
        device: A `jax.Device`, a name such as "cpu" or "gpu:1", a `Sharding`, or None for JAX's default device.
    """

    passive: ClassVar[bool] = True

    device: object = None  # JAX has no type for devices

    def __post_init__(self) -> None:
        if not isinstance(self.device, jax.Device | jax.sharding.Sharding | str | None):
            raise TypeError(
                "DevicePutTransform needs a jax.Device, a name such as 'cpu' or 'gpu:1', a Sharding or None. "
                f"Got {describe_value(self.device)}."
            )

    @property
    def placement(self) -> Any:
        """The device or sharding meant; None leaves it to JAX."""
        return _named_device(self.device) if isinstance(self.device, str) else self.device

    def apply(self, value: PyTree, mask: jax.Array, key: jax.Array | None) -> tuple[PyTree, jax.Array]:
        return value, mask  # the loader places what leaves the compiled program

    def __repr__(self) -> str:
        return call_text(self)


def _named_device(name: str) -> Any:
    platform, _, number = name.partition(":")
    try:
        return jax.devices(platform)[int(number or 0)]
    except (RuntimeError, ValueError, IndexError):
        known = ", ".join(f"{device.platform}:{i}" for i, device in enumerate(jax.devices()))
        raise ValueError(f"DevicePutTransform knows no device {name!r}. This process has {known}.") from None
