"""The shape of a mesh before the devices are known: sizes, one of which may be left to them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from millstream.text.errors import describe_value


@dataclasses.dataclass(frozen=True)
class HybridMeshShape:
    """A mesh over two networks: a fast one inside each group of devices, a slow one between the groups.

    Along every axis the mesh has `ici * dcn` devices. A group is a TPU slice where there are several, else a host.

    Example:
        >>> shape = ms.sharding.HybridMeshShape(ici_mesh_shape=(1, -1), dcn_mesh_shape=(-1, 1))
        >>> len(shape)
        2

    Args:
        ici_mesh_shape: Sizes inside a group (ICI, NVLink). One may be -1: what the devices of a group leave over.
        dcn_mesh_shape: Sizes between groups (the data centre's network). One may be -1: what the groups leave over.
    """

    ici_mesh_shape: Sequence[int]
    dcn_mesh_shape: Sequence[int]

    def __post_init__(self) -> None:
        for name in ("ici_mesh_shape", "dcn_mesh_shape"):
            object.__setattr__(self, name, checked_sizes("HybridMeshShape", name, getattr(self, name)))
        if len(self.ici_mesh_shape) != len(self.dcn_mesh_shape):
            raise ValueError(
                "HybridMeshShape needs two shapes with one size per axis each, 1 where an axis does not cross a "
                f"network. Got ici_mesh_shape {self.ici_mesh_shape} and dcn_mesh_shape {self.dcn_mesh_shape}."
            )

    def __len__(self) -> int:
        return len(self.ici_mesh_shape)


MeshShape = Sequence[int] | HybridMeshShape


def checked_shape(who: str, name: str, shape: Any) -> tuple[int, ...] | HybridMeshShape:
    """A mesh shape with tuples inside, or an error that says what one is."""
    return shape if isinstance(shape, HybridMeshShape) else checked_sizes(who, name, shape)


def checked_sizes(who: str, name: str, sizes: Any) -> tuple[int, ...]:
    """Sizes as a tuple: ints of at least 1, and at most one -1."""
    sized = isinstance(sizes, Sequence) and not isinstance(sizes, str) and len(sizes) > 0
    if not sized or any(type(size) is not int or (size < 1 and size != -1) for size in sizes):
        raise ValueError(
            f"{who} needs {name} to be one int per axis, each at least 1, or -1 where the number of devices decides. "
            f"Got {describe_value(sizes)}."
        )
    if sum(size == -1 for size in sizes) > 1:
        raise ValueError(f"{who} can infer one size of {name}. Got {tuple(sizes)}: write out all but one -1.")
    return tuple(sizes)


def complete(who: str, sizes: Sequence[int], count: int, things: str) -> tuple[int, ...]:
    """Sizes whose product is `count`, with the -1 filled in."""
    known = math.prod(size for size in sizes if size != -1)
    fits = count % known == 0 if -1 in sizes else count == known
    if not fits:
        rule = f"a multiple of {known}" if -1 in sizes else f"{known}"
        raise ValueError(
            f"{who} with shape {tuple(sizes)} needs {rule} {things}. There are {count}. "
            "Change the shape, or choose the devices: create_device_mesh(devices=...)."
        )
    return tuple(count // known if size == -1 else size for size in sizes)
