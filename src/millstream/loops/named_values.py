"""Calling a user's function with those of several named values that it has arguments for."""

import inspect
from collections.abc import Mapping
from typing import Any


def named_parameters(what: str, fn: Any) -> list[inspect.Parameter]:
    """The parameters of a function, all of which must be able to be passed by name.

    Args:
        what: What the function is, for errors.
        fn: The function.
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = None
    if parameters is None or any(parameter.kind == parameter.POSITIONAL_ONLY for parameter in parameters):
        raise TypeError(
            f"{what} is called with keyword arguments, which it does not accept. Wrap it: lambda preds, target: ..."
        )
    return [parameter for parameter in parameters if parameter.kind != parameter.VAR_POSITIONAL]


def asked_for(what: str, fn: Any, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Those of the values that a function has arguments for, and the names of arguments that have no value.

    Example:
        >>> from millstream.loops.named_values import asked_for
        >>> asked_for("The metric", lambda preds, target: 0, {"preds": 1, "mask": 2})
        ({'preds': 1}, ['target'])

    Args:
        what: What the function is, for errors.
        fn: The function.
        values: The values, by name.
    """
    parameters = named_parameters(what, fn)
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        return dict(values), []
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    missing = [name for name in needed if name not in values]
    return {parameter.name: values[parameter.name] for parameter in parameters if parameter.name in values}, missing
