"""Devices on a grid over two networks: groups along some axes, the devices of a group along the others."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

from millstream.sharding._mesh_shape import HybridMeshShape, complete


def slice_count(devices: Sequence[Any]) -> int:
    """How many slices the devices are in; only some platforms have slices."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def hybrid_grid(who: str, devices: Sequence[Any], shape: HybridMeshShape) -> np.ndarray:
    """The devices as an array of shape `ici * dcn`."""
    slices = slice_count(devices)
    hosts = len({device.process_index for device in devices})
    groups = slices if slices > 1 else hosts
    dcn = complete(who, shape.dcn_mesh_shape, groups, "hosts") if -1 in shape.dcn_mesh_shape else shape.dcn_mesh_shape
    if len(devices) % math.prod(dcn):
        raise ValueError(
            f"{who} needs groups of one size. Got {len(devices)} devices for dcn_mesh_shape {tuple(dcn)}, "
            f"which is {math.prod(dcn)} groups."
        )
    ici = complete(who, shape.ici_mesh_shape, len(devices) // math.prod(dcn), "devices per group")
    if slices > 1 or math.prod(dcn) == hosts:
        return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, process_is_granule=slices == 1)
    return _in_blocks(devices, ici, dcn)


def across_slices(who: str, sizes: Sequence[int], slices: int) -> HybridMeshShape:
    """A plain shape over several slices: they lie along the first axis that divides by their number."""
    for axis, size in enumerate(sizes):
        if size % slices == 0:
            dcn = tuple(slices if other == axis else 1 for other in range(len(sizes)))
            return HybridMeshShape([size // groups for size, groups in zip(sizes, dcn, strict=True)], dcn)
    raise ValueError(
        f"{who} needs an axis that divides by the {slices} slices the devices are in. Got mesh_shape {tuple(sizes)}. "
        "Give a HybridMeshShape to say how the slices lie."
    )


def _in_blocks(devices: Sequence[Any], ici: Sequence[int], dcn: Sequence[int]) -> np.ndarray:
    """Groups that are not whole hosts: parts of one host, to try a hybrid mesh on, or several hosts together."""
    grid = np.empty(len(devices), dtype=object)
    grid[:] = sorted(devices, key=lambda device: (device.process_index, device.id))
    axes = len(ici)
    pairs = [axis for pair in zip(range(axes), range(axes, 2 * axes), strict=True) for axis in pair]
    return grid.reshape((*dcn, *ici)).transpose(pairs).reshape(np.multiply(dcn, ici))
