"""Datasets that are there already: a list, a range."""

from typing import TypeVar

from millstream.dialects.loadax._dataset import Dataset, Items, item_of, require_items
from millstream.text.errors import describe_value

T_co = TypeVar("T_co", covariant=True)


class InMemoryDataset(Dataset[T_co]):
    """The items of a list, or of anything with a length and `[index]` or `get(index)`.

    Example:
        >>> dataset = InMemoryDataset(["a", "b", "c"])
        >>> len(dataset), dataset[-1], dataset.get(3)
        (3, 'c', None)

    Args:
        items: The items; they are not copied.
    """

    def __init__(self, items: Items[T_co]) -> None:
        require_items("InMemoryDataset", items)
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int, /) -> T_co:
        return item_of(self.items, self._number(index))

    def __repr__(self) -> str:
        first = [item_of(self.items, index) for index in range(min(2, len(self)))]
        return f"InMemoryDataset(items={first}...)"


SimpleDataset = InMemoryDataset


class RangeDataset(Dataset[int]):
    """The numbers of a `range`.

    Example:
        >>> list(RangeDataset(0, 10, 3))
        [0, 3, 6, 9]

    Args:
        start: The first one.
        end: Where they end; it is not one of them. There must be at least one number before it.
        step: From one to the next; not 0.
    """

    def __init__(self, start: int, end: int, step: int = 1) -> None:
        for name, value in (("start", start), ("end", end), ("step", step)):
            if isinstance(value, bool) or not isinstance(value, int) or (name, value) == ("step", 0):
                rule = "an int other than 0" if name == "step" else "an int"
                raise ValueError(f"RangeDataset needs {name} to be {rule}. Got {describe_value(value)}.")
        self.start, self.end, self.step = start, end, step
        self._range = range(start, end, step)
        if not self._range:
            raise ValueError(
                f"RangeDataset needs at least one number from start to before end. Got start {start}, end {end} and "
                f"step {step}."
            )

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: int, /) -> int:
        return self._range[self._number(index)]

    def __repr__(self) -> str:
        return f"RangeDataset(start={self.start}, end={self.end}, step={self.step})"
