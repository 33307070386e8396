"""The two usual meshes: every device a copy of the model, or the model spread over the devices of a host."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from millstream.sharding.mesh_config import HybridMeshShape, MeshConfig, MeshShape
from millstream.text.errors import require_names


def make_ddp_mesh_config(
    mesh_axis_names: Sequence[str] = ("data",),
    batch_axis_names: str | Sequence[str] = "data",
    mesh_rules: Sequence[tuple[str, MeshShape]] | None = None,
    mesh_selector: str | None = None,
) -> MeshConfig:
    """Data parallel: all devices along the first axis, each with a copy of the model and rows of its own.

    No device is asked for, so it can be called before `jax.distributed.initialize`.

    Example:
        >>> ms.sharding.make_ddp_mesh_config().mesh_shape
        (-1,)

    Args:
        mesh_axis_names: One name per axis; axes behind the first have size 1.
        batch_axis_names: The axis or axes that rows are divided over.
        mesh_rules: See `MeshConfig`.
        mesh_selector: What the rules are matched with; where one matches, its shape is taken.
    """
    shape = [-1, *_ones("make_ddp_mesh_config", mesh_axis_names)]
    return _selected(MeshConfig(shape, mesh_axis_names, batch_axis_names, mesh_rules), mesh_selector)


def make_fsdp_mesh_config(
    mesh_axis_names: Sequence[str] = ("data", "model"),
    batch_axis_names: str | Sequence[str] | None = None,
    mesh_rules: Sequence[tuple[str, MeshShape]] | None = None,
    mesh_selector: str | None = None,
) -> MeshConfig:
    """Fully sharded data parallel: hosts along the first axis, the devices of a host along the last.

    Parameters are spread over the last axis, whose network is the fast one. Where there are several TPU slices, they
    stand in the place of hosts. No device is asked for, so it can be called before `jax.distributed.initialize`.

    Example:
        >>> ms.sharding.make_fsdp_mesh_config().mesh_shape
        HybridMeshShape(ici_mesh_shape=(1, -1), dcn_mesh_shape=(-1, 1))

    Args:
        mesh_axis_names: One name per axis; axes between the first and the last have size 1.
        batch_axis_names: The axis or axes that rows are divided over; by default all, so that every device has rows
            of its own. With "data" alone, the devices of a host share them, as tensor parallelism wants it.
        mesh_rules: See `MeshConfig`.
        mesh_selector: What the rules are matched with; where one matches, its shape is taken.
    """
    ones = _ones("make_fsdp_mesh_config", mesh_axis_names)
    shape = HybridMeshShape(ici_mesh_shape=[*ones, -1], dcn_mesh_shape=[-1, *ones])
    batch_axes = mesh_axis_names if batch_axis_names is None else batch_axis_names
    return _selected(MeshConfig(shape, mesh_axis_names, batch_axes, mesh_rules), mesh_selector)


def _ones(who: str, names: Any) -> list[int]:
    """A size of 1 for each axis but one."""
    return [1] * (len(require_names(who, "mesh_axis_names", names)) - 1)


def _selected(config: MeshConfig, selector: str | None) -> MeshConfig:
    return dataclasses.replace(config, mesh_shape=config.shape_for(selector))
