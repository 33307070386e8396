"""A mesh as a value: it can be written down, compared and stored before any device is known."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from millstream.sharding._device_grid import across_slices, hybrid_grid, slice_count
from millstream.sharding._mesh_shape import HybridMeshShape, MeshShape, checked_shape, complete
from millstream.text.errors import describe_value, listed, require_text


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The shape and the axes of a device mesh, and which axes the rows of a batch are divided over.

    Example:
        >>> config = ms.sharding.MeshConfig((-1, 1), ("data", "model"))
        >>> mesh = config.create_device_mesh()
        >>> config.batch_sharding(mesh).spec
        P('data',)

    Args:
        mesh_shape: One size per axis. One may be -1: it follows from the number of devices. A `HybridMeshShape` says
            apart what lies inside a host or slice, and what between them.
        mesh_axis_names: One name per axis.
        batch_axis_names: The axis or axes that rows are divided over; on the others they are repeated.
        mesh_rules: Pairs of a regular expression and a shape. The first expression that matches the whole of a
            selector (`re.fullmatch`: "v5e" is not "v5e-256", "v5e.*" is both) replaces `mesh_shape`.
    """

    mesh_shape: MeshShape
    mesh_axis_names: Sequence[str]
    batch_axis_names: str | Sequence[str] = "data"
    mesh_rules: Sequence[tuple[str, MeshShape]] | None = None

    def __post_init__(self) -> None:
        names = _checked_names(self.mesh_axis_names)
        rules = _checked_rules(self.mesh_rules)
        object.__setattr__(self, "mesh_axis_names", names)
        object.__setattr__(self, "mesh_shape", checked_shape("MeshConfig", "mesh_shape", self.mesh_shape))
        object.__setattr__(self, "mesh_rules", rules)
        for shape in (self.mesh_shape, *(shape for _, shape in rules)):
            if len(shape) != len(names):
                raise ValueError(
                    f"MeshConfig needs one size for each of the axes {', '.join(map(repr, names))}. Got {shape}."
                )
        object.__setattr__(self, "batch_axis_names", checked_axes("MeshConfig", self.batch_axis_names, names))

    @property
    def hosts(self) -> int:
        """How many processes there are."""
        return jax.process_count()

    @property
    def host_id(self) -> int:
        """Which of them this one is."""
        return jax.process_index()

    def shape_for(self, selector: str | None) -> MeshShape:
        """The shape of the first rule that matches the selector, or `mesh_shape`.

        Example:
            >>> config = ms.sharding.MeshConfig((-1,), ("data",), mesh_rules=[("v5e-.*", (16,))])
            >>> config.shape_for("v5e-256"), config.shape_for("h100")
            ((16,), (-1,))
        """
        if selector is not None:
            require_text("MeshConfig", "selector", selector)
        if selector is not None and self.mesh_rules is not None:
            for pattern, shape in self.mesh_rules:
                if re.fullmatch(pattern, selector):
                    return shape
        return self.mesh_shape

    def create_device_mesh(self, devices: Sequence[Any] | None = None, selector: str | None = None) -> Mesh:
        """The mesh, with all its axes `Auto`: the compiler chooses how values inside a program are divided.

        Example:
            >>> mesh = ms.sharding.MeshConfig((-1,), ("data",)).create_device_mesh()

        Args:
            devices: Those of the mesh, all of which are used; by default `jax.devices()`.
            selector: What the rules are matched with, such as the name of a type of machine.
        """
        given = jax.devices() if devices is None else listed(devices)
        if not given or not all(isinstance(device, jax.Device) for device in given):
            raise TypeError(f"MeshConfig needs devices to be a list of jax.Devices. Got {describe_value(devices)}.")
        devices = given
        shape, names = self.shape_for(selector), tuple(self.mesh_axis_names)
        types = (AxisType.Auto,) * len(names)
        if not isinstance(shape, HybridMeshShape):
            shape = complete("MeshConfig", shape, len(devices), "devices")
            slices = slice_count(devices)
            if slices == 1:
                return jax.make_mesh(shape, names, types, devices=devices)
            shape = across_slices("MeshConfig", shape, slices)
        return Mesh(hybrid_grid("MeshConfig", devices, shape), names, axis_types=types)

    def batch_sharding(self, mesh: Mesh) -> NamedSharding:
        """Rows over the batch axes of a mesh.

        Example:
            >>> config = ms.sharding.MeshConfig((-1,), ("data",))
            >>> sharding = config.batch_sharding(config.create_device_mesh())
        """
        if not isinstance(mesh, Mesh):
            raise TypeError(f"MeshConfig needs mesh to be a jax.sharding.Mesh. Got {describe_value(mesh)}.")
        return over_axes(mesh, tuple(self.batch_axis_names))


def over_axes(mesh: Mesh, axes: tuple[str, ...]) -> NamedSharding:
    """The first axis of an array over some axes of a mesh; over none, it is repeated everywhere."""
    if not axes:
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec(axes[0] if len(axes) == 1 else axes))


def checked_axes(who: str, axes: Any, known: Sequence[str]) -> tuple[str, ...]:
    """The names of some axes of a mesh as a tuple; all must be known."""
    names = [axes] if isinstance(axes, str) else axes
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{who} needs batch_axis_names to be the name of an axis, or several. Got {describe_value(axes)}."
        )
    for name in names:
        if name not in known:
            raise ValueError(
                f"{who} knows no axis {name!r} to divide a batch over. The mesh has: {', '.join(map(repr, known))}."
            )
    if len(set(names)) < len(names):
        raise ValueError(f"{who} can divide a batch over an axis once. Got {tuple(names)}.")
    return tuple(names)


def _checked_names(names: Any) -> tuple[str, ...]:
    is_list = not isinstance(names, str) and isinstance(names, Sequence) and len(names) > 0
    if not is_list or any(not isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError(
            "MeshConfig needs mesh_axis_names to be a tuple of different names, such as ('data', 'model'). "
            f"Got {describe_value(names)}."
        )
    return tuple(names)


def _checked_rules(rules: Any) -> tuple[tuple[str, MeshShape], ...]:
    pairs = [] if rules is None else listed(rules)
    if pairs is None:
        raise TypeError(
            "MeshConfig needs mesh_rules to be a list of pairs (regular expression, shape). "
            f"Got {describe_value(rules)}."
        )
    return tuple(map(_checked_rule, pairs))


def _checked_rule(rule: Any) -> tuple[str, MeshShape]:
    if not isinstance(rule, Sequence) or len(rule) != 2 or not isinstance(rule[0], str):
        raise ValueError(
            f"MeshConfig needs each of mesh_rules to be a pair (regular expression, shape). Got {describe_value(rule)}."
        )
    pattern, shape = rule
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"MeshConfig cannot read {pattern!r} in mesh_rules as a regular expression: {error}."
        ) from None
    return pattern, checked_shape("MeshConfig", f"the shape of the rule {pattern!r}", shape)
