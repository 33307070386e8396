"""Flattening plain containers without JAX, for worker processes."""

from typing import Any


class OtherStructure(Exception):
    """A tree that is not shaped like its template."""


def flatten_like(template: Any, tree: Any) -> list[Any]:
    """The leaves of a tree of dicts, lists, tuples and None that is shaped like `template`, in JAX's order."""
    leaves: list[Any] = []
    _collect(template, tree, leaves)
    return leaves


def _collect(template: Any, tree: Any, leaves: list[Any]) -> None:
    kind = type(template)
    if kind is dict:
        if type(tree) is not dict or tree.keys() != template.keys():
            raise OtherStructure
        for key in sorted(template):
            _collect(template[key], tree[key], leaves)
    elif kind is list or isinstance(template, tuple):
        if type(tree) is not kind or len(tree) != len(template):
            raise OtherStructure
        for inner, branch in zip(template, tree, strict=True):
            _collect(inner, branch, leaves)
    elif template is None:
        if tree is not None:
            raise OtherStructure
    else:
        leaves.append(tree)


def unflatten_like(template: Any, leaves: list[Any]) -> Any:
    """The tree whose leaves these are; the leaves of `template` are their numbers."""
    if isinstance(template, dict):
        return {key: unflatten_like(branch, leaves) for key, branch in template.items()}
    if isinstance(template, tuple) and hasattr(template, "_fields"):
        return type(template)(*(unflatten_like(branch, leaves) for branch in template))
    if isinstance(template, list | tuple):
        return type(template)(unflatten_like(branch, leaves) for branch in template)
    return None if template is None else leaves[template]


def outline(tree: Any) -> str:
    """A tree in words, with a star for every leaf."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {outline(branch)}" for key, branch in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        name = "" if type(tree) in (list, tuple) else type(tree).__name__
        inside = ", ".join(map(outline, tree))
        return f"{name}[{inside}]" if isinstance(tree, list) else f"{name}({inside})"
    return "None" if tree is None else "*"
