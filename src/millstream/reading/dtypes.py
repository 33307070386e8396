"""Dtypes of numbers: which they are, and in which of them JAX keeps an array."""

import functools
import re
from typing import Any

import numpy as np

from millstream.text.errors import describe_leaf, describe_value

_PAIRS = (("int64", "int32"), ("uint64", "uint32"), ("float64", "float32"), ("complex128", "complex64"))
_EXTENDED = {np.dtype(np.longdouble), np.dtype(np.clongdouble)} - {np.dtype(np.float64), np.dtype(np.complex128)}
_NAME = re.compile(r"bool|[a-z]+\d+[a-z0-9_]*|[<>][iufc]\d+")
_NARROW = {np.dtype(wide): np.dtype(narrow) for wide, narrow in _PAIRS}


def holds_numbers(dtype: np.dtype) -> bool:
    """Whether an array of this dtype is its bytes: numbers and bools, those of JAX included."""
    return dtype.kind in "biufc" or (dtype.kind == "V" and dtype.isbuiltin == 2)


def check_array(name: str, leaf: Any) -> None:
    """Refuse arrays that would lose what they mean: masked ones, and numbers of more than 64 bits."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: a masked array ({describe_leaf(leaf)}) would lose its mask. Fill it, as in array.filled(0), and "
            "pass np.ma.getmaskarray(array) as an array of its own."
        )
    dtype = getattr(leaf, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype in _EXTENDED:
        raise TypeError(f"{name}: JAX has no {dtype}. Convert it, as in array.astype(np.float32).")


def dtype_of_array(value: Any) -> np.dtype | None:
    """The dtype of an array of any library; None for other values, and for a dtype that NumPy does not know."""
    try:
        return np.dtype(value.dtype) if hasattr(value, "shape") else None
    except (AttributeError, TypeError, ValueError):
        return None


def require_dtype(caller: str, name: str, value: Any) -> np.dtype:
    """The dtype that is meant by a value such as np.float32 or "int8"; refuse what means none."""
    try:
        return np.dtype(value)
    except Exception:
        raise TypeError(f"{caller} needs {name} to be a dtype. Got {describe_value(value)}.") from None


def dtype_name(dtype: np.dtype) -> str:
    """A name from which `named_dtype` makes the same dtype, byte order included."""
    return dtype.name if dtype.isnative else dtype.str


def named_dtype(name: str) -> np.dtype:
    """The dtype of numbers that has this name; a ValueError if there is none. Needs no JAX."""
    if _NAME.fullmatch(name):
        try:
            dtype = np.dtype(name)
        except TypeError:
            import ml_dtypes

            dtype = np.dtype(getattr(ml_dtypes, name, object))
        if dtype_name(dtype) == name and holds_numbers(dtype):
            return dtype
    raise ValueError(f"{name!r} is not the name of a dtype of numbers")


def kept_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype JAX keeps such numbers in: in this machine's byte order and, unless x64 is set, of at most 32 bits."""
    import jax

    return np.dtype(jax.dtypes.canonicalize_dtype(dtype.newbyteorder("=")))


@functools.cache
def can_become(dtype: np.dtype, kept: np.dtype) -> bool:
    """Whether `kept` is a dtype that JAX keeps such numbers in. Needs no JAX."""
    native = dtype.newbyteorder("=")
    return kept in (native, _NARROW.get(native))


def narrowed(caller: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in the dtype JAX keeps it in; integers that do not fit are refused."""
    if array.dtype == dtype:
        return array
    if array.dtype.kind in "iu" and array.dtype.itemsize > dtype.itemsize and array.size:
        limits, low, high = np.iinfo(dtype), array.min(), array.max()
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"{caller}: JAX keeps {array.dtype} as {dtype}, but the values run from {low} to {high}. "
                "Renumber them, keep them out of the batch with ms.transforms.InfoTransform, or set "
                "jax.config.update('jax_enable_x64', True)."
            )
    return array.astype(dtype)


def exactly(value: Any, dtype: np.dtype) -> np.ndarray | None:
    """A number in a dtype; None if it would be a different number there."""
    given = np.asarray(value)
    try:
        with np.errstate(all="ignore"):
            kept = given.astype(dtype)
    except OverflowError:  # a number of Python's of more than 64 bits
        return None
    same = bool(kept == given) or (bool(given != given) and bool(kept != kept))
    return kept if same else None


def to_jax_dtype(caller: str, value: Any) -> Any:
    """An array of NumPy as JAX keeps it, all else as it is; for a device, which cuts off integers without a word."""
    if not isinstance(value, np.ndarray | np.generic):
        return value
    return narrowed(caller, np.asarray(value), kept_dtype(value.dtype))
