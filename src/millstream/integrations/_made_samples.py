"""What a function of the user's makes of what was read."""

from collections.abc import Callable, Iterable
from typing import Any

from millstream.reading.contracts import PyTree
from millstream.text.errors import function_name, noted


def made_samples(
    who: str, argument: str, fn: Callable[[Any], PyTree], indices: Iterable[int], items: Iterable[Any]
) -> list[PyTree]:
    """A sample of each item; an error of the function says at which it was.

    Args:
        who: Whose function it is.
        argument: As what it was given.
        fn: The function.
        indices: The numbers of the samples.
        items: What is made into samples.
    """
    samples = []
    for index, item in zip(indices, items, strict=True):
        try:
            samples.append(fn(item))
        except Exception as error:
            note = f"This came from {function_name(fn)}, the {argument} of {who}, at sample {index}."
            raise noted(error, note)  # noqa: B904 (`from` would take away the error's own cause)
    return samples
