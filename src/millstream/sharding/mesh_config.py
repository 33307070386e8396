"""A mesh as a value: it can be written down, compared and stored before any device is known."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from millstream.text.errors import describe_value, listed, require_names, require_text


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
            object.__setattr__(self, name, _checked_sizes("HybridMeshShape", name, getattr(self, name)))
        if len(self.ici_mesh_shape) != len(self.dcn_mesh_shape):
            raise ValueError(
                "HybridMeshShape needs two shapes with one size per axis each, 1 where an axis does not cross a "
                f"network. Got ici_mesh_shape {self.ici_mesh_shape} and dcn_mesh_shape {self.dcn_mesh_shape}."
            )

    def __len__(self) -> int:
        return len(self.ici_mesh_shape)


MeshShape = Sequence[int] | HybridMeshShape


def _checked_shape(caller: str, name: str, shape: Any) -> tuple[int, ...] | HybridMeshShape:
    """A mesh shape with tuples inside, or an error that says what one is."""
    return shape if isinstance(shape, HybridMeshShape) else _checked_sizes(caller, name, shape)


def _checked_sizes(caller: str, name: str, sizes: Any) -> tuple[int, ...]:
    """Sizes as a tuple: ints of at least 1, and at most one -1."""
    sized = isinstance(sizes, Sequence) and not isinstance(sizes, str) and len(sizes) > 0
    if not sized or any(type(size) is not int or (size < 1 and size != -1) for size in sizes):
        raise ValueError(
            f"{caller} needs {name} to be one int per axis, each at least 1, or -1 where the number of devices "
            f"decides. Got {describe_value(sizes)}."
        )
    if sum(size == -1 for size in sizes) > 1:
        raise ValueError(f"{caller} can infer one size of {name}. Got {tuple(sizes)}: write out all but one -1.")
    return tuple(sizes)


def _complete(caller: str, sizes: Sequence[int], count: int, things: str) -> tuple[int, ...]:
    """Sizes whose product is `count`, with the -1 filled in."""
    known = math.prod(size for size in sizes if size != -1)
    fits = count % known == 0 if -1 in sizes else count == known
    if not fits:
        rule = f"a multiple of {known}" if -1 in sizes else f"{known}"
        raise ValueError(
            f"{caller} with shape {tuple(sizes)} needs {rule} {things}. There are {count}. "
            "Change the shape, or choose the devices: create_device_mesh(devices=...)."
        )
    return tuple(count // known if size == -1 else size for size in sizes)


def _slice_count(devices: Sequence[Any]) -> int:
    """How many slices the devices are in; only some platforms have slices."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def hybrid_grid(caller: str, devices: Sequence[Any], shape: HybridMeshShape) -> np.ndarray:
    """The devices as an array of shape `ici * dcn`."""
    slices = _slice_count(devices)
    hosts = len({device.process_index for device in devices})
    groups = slices if slices > 1 else hosts
    dcn = (
        _complete(caller, shape.dcn_mesh_shape, groups, "hosts") if -1 in shape.dcn_mesh_shape else shape.dcn_mesh_shape
    )
    if len(devices) % math.prod(dcn):
        raise ValueError(
            f"{caller} needs groups of one size. Got {len(devices)} devices for dcn_mesh_shape {tuple(dcn)}, "
            f"which is {math.prod(dcn)} groups."
        )
    ici = _complete(caller, shape.ici_mesh_shape, len(devices) // math.prod(dcn), "devices per group")
    if slices > 1 or math.prod(dcn) == hosts:
        return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, process_is_granule=slices == 1)
    return _in_blocks(devices, ici, dcn)


def across_slices(caller: str, sizes: Sequence[int], slices: int) -> HybridMeshShape:
    """A plain shape over several slices: they lie along the first axis that divides by their number."""
    for axis, size in enumerate(sizes):
        if size % slices == 0:
            dcn = tuple(slices if other == axis else 1 for other in range(len(sizes)))
            return HybridMeshShape([size // groups for size, groups in zip(sizes, dcn, strict=True)], dcn)
    raise ValueError(
        f"{caller} needs an axis that divides by the {slices} slices the devices are in. Got mesh_shape "
        f"{tuple(sizes)}. Give a HybridMeshShape to say how the slices lie."
    )


def _in_blocks(devices: Sequence[Any], ici: Sequence[int], dcn: Sequence[int]) -> np.ndarray:
    """Groups that are not whole hosts: parts of one host, to try a hybrid mesh on, or several hosts together."""
    grid = np.empty(len(devices), dtype=object)
    grid[:] = sorted(devices, key=lambda device: (device.process_index, device.id))
    axes = len(ici)
    pairs = [axis for pair in zip(range(axes), range(axes, 2 * axes), strict=True) for axis in pair]
    return grid.reshape((*dcn, *ici)).transpose(pairs).reshape(np.multiply(dcn, ici))


def given_or_context_mesh(caller: str, mesh: Mesh | None) -> Mesh:
    """The mesh given, or the one in force; it has devices."""
    if mesh is None:
        mesh = jax.sharding.get_mesh()
        mesh = _entered_mesh() if mesh.empty else mesh
    if mesh is None:
        raise ValueError(f"{caller} needs a mesh. Give it one, mesh=..., or call it inside `with jax.set_mesh(mesh):`.")
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"{caller} needs mesh to be a jax.sharding.Mesh. Got {describe_value(mesh)}. "
            "A MeshConfig makes one with create_device_mesh()."
        )
    return mesh


def _entered_mesh() -> Mesh | None:
    # `with mesh:` is shown by no public function, but a spec is resolved against it when one is traced.
    try:
        traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()))(0.0)
    except RuntimeError:
        return None
    return traced.eqns[0].params["sharding"].mesh


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
        object.__setattr__(self, "mesh_shape", _checked_shape("MeshConfig", "mesh_shape", self.mesh_shape))
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

    def create_device_mesh(self, devices: Sequence[object] | None = None, selector: str | None = None) -> Mesh:
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
            shape = _complete("MeshConfig", shape, len(devices), "devices")
            slices = _slice_count(devices)
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


def checked_axes(caller: str, axes: Any, known: Sequence[str]) -> tuple[str, ...]:
    """The names of some axes of a mesh as a tuple; all must be known."""
    names = [axes] if isinstance(axes, str) else axes
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{caller} needs batch_axis_names to be the name of an axis, or several. Got {describe_value(axes)}."
        )
    for name in names:
        if name not in known:
            raise ValueError(
                f"{caller} knows no axis {name!r} to divide a batch over. The mesh has: {', '.join(map(repr, known))}."
            )
    if len(set(names)) < len(names):
        raise ValueError(f"{caller} can divide a batch over an axis once. Got {tuple(names)}.")
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
    return pattern, _checked_shape("MeshConfig", f"the shape of the rule {pattern!r}", shape)


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
        mesh_axis_names: One name per axis; axes after the first have size 1.
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


def _ones(caller: str, names: Any) -> list[int]:
    """A size of 1 for each axis but one."""
    return [1] * (len(require_names(caller, "mesh_axis_names", names)) - 1)


def _selected(config: MeshConfig, selector: str | None) -> MeshConfig:
    return dataclasses.replace(config, mesh_shape=config.shape_for(selector))
