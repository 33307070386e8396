"""The mesh the caller is in, by `jax.set_mesh` or by the older `with mesh:`."""

import jax
from jax.sharding import Mesh, PartitionSpec

from millstream.text.errors import describe_value


def given_or_context_mesh(who: str, mesh: Mesh | None) -> Mesh:
    """The mesh given, or the one in force; it has devices."""
    if mesh is None:
        mesh = jax.sharding.get_mesh()
        mesh = _entered_mesh() if mesh.empty else mesh
    if mesh is None:
        raise ValueError(f"{who} needs a mesh. Give it one, mesh=..., or call it inside `with jax.set_mesh(mesh):`.")
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"{who} needs mesh to be a jax.sharding.Mesh. Got {describe_value(mesh)}. "
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
