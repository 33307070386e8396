"""What a step has to say: named values, in collections."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn, Self

import jax
from jax.typing import ArrayLike

from millstream.loops.media import HISTOGRAMS, IMAGES, as_images, pack_histogram
from millstream.text.errors import describe_value, did_you_mean, require_bool
from millstream.text.summaries import value_text

Name = tuple[str, str]  # collection and entry
EVALUATIONS = ("_test", "_valid", "_validation", "_val", "_eval")  # how names of test results end
_MOST_LISTED = 20  # names in an error


class Entries(dict[str, Any]):
    """The entries of one collection, readable as attributes.

    Example:
        >>> ms.loops.Entries(loss=0.5).loss
        0.5
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"There is no entry {name!r}. There are: {', '.join(self) or 'none'}.")


class Logs(dict[str, dict[str, Any]]):
    """Named values in collections: `losses`, `metrics`, `stateful_metrics`, `outputs`, or any of your own.

    A pytree, so a compiled step can return it. Metrics are averaged over an epoch, weighted by samples; stateful
    metrics are averages already and count as they are; outputs are arrays, one after the other. Images and histograms
    go to writers that can show them, and are in no table of the history.

    Example:
        >>> logs = ms.logs().add_loss("loss", 0.5).add_metrics(accuracy=0.9, error=0.1)
        >>> logs.losses.loss
        0.5
        >>> logs.entry_value("accuracy")
        0.9
    """

    def __getattr__(self, collection: str) -> Entries:
        if collection in self:
            return Entries(self[collection])
        raise AttributeError(f"The logs have no collection {collection!r}. They have: {', '.join(self) or 'none'}.")

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "updates":
            raise AttributeError(f"Logs are filled with add_metric and the like, or `logs.updates = ...`, not .{name}.")
        super().__setattr__(name, value)

    @property
    def updates(self) -> NoReturn:
        """Only to be assigned: `logs.updates, state = step(state, batch)` merges what the step returns."""
        raise AttributeError("logs.updates can only be assigned; read the logs themselves.")

    @updates.setter
    def updates(self, value: Mapping[str, object] | None) -> None:
        self.merge(value)

    def add_entry(self, collection: str, name: str, value: object) -> Self:
        """One value in a collection of your own."""
        _require_names(collection, name)
        self.setdefault(collection, {})[name] = value
        return self

    def add_entries(self, collection: str, entries: Mapping[str, object] | None = None, /, **more: object) -> Self:
        """Several values in a collection of your own, as `dict.update` takes them: a mapping, keywords, or both."""
        entries = {} if entries is None else entries
        if not isinstance(entries, Mapping):
            raise TypeError(
                f"Logs needs several {collection} as a dict from names to values, such as {{'loss': 0.5}}, or as "
                f"keywords. Got {describe_value(entries)}."
            )
        _require_names(collection, *entries)
        self.setdefault(collection, {}).update(entries, **more)
        return self

    def add_loss(self, name: str, value: object, *, add_metric: bool = False) -> Self:
        """A loss, which a managed train step minimises; also as a metric, if that is wanted."""
        require_bool("Logs.add_loss", "add_metric", add_metric)
        self.add_entry("losses", name, value)
        return self.add_metric(name, value) if add_metric else self

    def add_losses(
        self, losses: Mapping[str, object] | None = None, /, *, add_metrics: bool = False, **more: object
    ) -> Self:
        """Several losses: a mapping, keywords, or both."""
        require_bool("Logs.add_losses", "add_metrics", add_metrics)
        self.add_entries("losses", losses, **more)
        return self.add_metrics(losses, **more) if add_metrics else self

    def add_metric(self, name: str, value: object) -> Self:
        """A value of this batch alone."""
        return self.add_entry("metrics", name, value)

    def add_metrics(self, metrics: Mapping[str, object] | None = None, /, **more: object) -> Self:
        """Several metrics: a mapping, keywords, or both."""
        return self.add_entries("metrics", metrics, **more)

    def add_stateful_metric(self, name: str, value: object) -> Self:
        """A value that stands for all batches so far."""
        return self.add_entry("stateful_metrics", name, value)

    def add_stateful_metrics(self, metrics: Mapping[str, object] | None = None, /, **more: object) -> Self:
        """Several stateful metrics: a mapping, keywords, or both."""
        return self.add_entries("stateful_metrics", metrics, **more)

    def add_output(self, name: str, value: object) -> Self:
        """What the model says, one row per sample."""
        return self.add_entry("outputs", name, value)

    def add_outputs(self, outputs: Mapping[str, object] | None = None, /, **more: object) -> Self:
        """Several outputs: a mapping, keywords, or both."""
        return self.add_entries("outputs", outputs, **more)

    def add_image(self, name: str, image: ArrayLike, *, most: int = 16) -> Self:
        """An image, or several, for `ms.record`, TensorBoard and their like; also in a compiled step.

        Example:
            >>> logs = ms.logs().add_image("digits", np.zeros((4, 8, 8, 1), np.uint8))
            >>> logs.images.digits.shape
            (4, 8, 8, 1)

        Not every one is kept: of an entry the first 32, and then one each time the steps have grown by 5 %. A test
        shows those of its first batch.

        Args:
            name: What they are called.
            image: HxW, HxWxC, or several as NxHxWxC, with 1, 3 or 4 channels: uint8, or floats from 0 to 1.
            most: How many of several to keep; the first ones.
        """
        return self.add_entry(IMAGES, name, as_images("Logs.add_image", image, most))

    def add_histogram(self, name: str, values: ArrayLike) -> Self:
        """How the values of an array are distributed; in a compiled step the program counts them.

        Example:
            >>> logs = ms.logs().add_histogram("gradient", np.array([0.0, 0.5, 1.0, np.nan]))
            >>> edges, counts = logs.histograms.gradient
            >>> edges[0], edges[-1], counts.sum()  # 64 bins, and a last count of what is not finite
            (np.float32(0.0), np.float32(1.0), np.float32(4.0))

        Which are kept is as for `add_image`.

        Args:
            name: What it is called.
            values: Real numbers of any shape.
        """
        return self.add_entry(HISTOGRAMS, name, pack_histogram("Logs.add_histogram", values))

    def merge(self, other: Mapping[str, object] | None) -> Self:
        """Take in other logs; their values win."""
        if other is not None:
            for collection, entries in as_logs("merge", other).items():
                self.setdefault(collection, {}).update(entries)
        return self

    def entries(self) -> Iterator[tuple[Name, Any]]:
        """All values, each with its collection and name."""
        for collection, entries in self.items():
            for name, value in entries.items():
                yield (collection, name), value

    def entry_path(self, name: str) -> Name:
        """The collection and name of an entry given as "name" or "collection.name"."""
        found = find_entry(name, [path for path, _ in self.entries()])
        if found is None:
            raise KeyError(f"Logs have no entry {describe_value(name)}. They have: {self._entry_names()}.")
        return found

    def entry_collection(self, name: str) -> str:
        """The collection that an entry is in."""
        return self.entry_path(name)[0]

    def entry_value(self, name: str) -> Any:
        """The value of an entry given as "name" or "collection.name"."""
        collection, entry = self.entry_path(name)
        return self[collection][entry]

    def _entry_names(self) -> str:
        return ", ".join(".".join(path) for path, _ in self.entries()) or "none"

    def __repr__(self) -> str:
        return f"Logs({value_text(self)})"


def logs() -> Logs:
    """Empty logs.

    Example:
        >>> ms.logs().add_metric("loss", 0.5)
        Logs({metrics: {loss: 0.5}})
    """
    return Logs()


def as_logs(caller: str, value: Any) -> Logs:
    """Logs, or a dict of collections, or of plain values, which are metrics then."""
    if isinstance(value, Logs):
        return value
    if type(value) is not dict and not isinstance(value, Mapping):  # the latter is slow
        raise TypeError(f"{caller} needs logs: ms.logs(), or a dict. Got {describe_value(value)}.")
    made = Logs()
    for name, entry in value.items():
        if type(entry) is dict or isinstance(entry, Mapping):
            made.setdefault(name, {}).update(entry)
        else:
            made.setdefault("metrics", {})[name] = entry
    return made


def _require_names(*names: Any) -> None:
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"Logs needs names that are text. Got {describe_value(name)}.")


def find_entry(name: str, paths: list[Name]) -> Name | None:
    """The entry that "name" or "collection.name" means; None if there is none."""
    if not isinstance(name, str):
        return None
    exact = [path for path in paths if ".".join(path) == name]
    found = exact or [path for path in paths if path[1] == name]
    # A loss that is also logged as a metric is one value under two names.
    found = [path for path in found if path[0] != "losses"] if len(found) > 1 else found
    if len(found) > 1:
        raise ValueError(
            f"{name!r} is in several collections: {', '.join('.'.join(path) for path in found)}. Say which."
        )
    return found[0] if found else None


def describe_logged(name: str, paths: Collection[Name], also: Iterable[str] = ()) -> str:
    """What was logged instead of a name, for errors: the name that was probably meant, and a list.

    Args:
        name: What was asked for.
        paths: All entries.
        also: Other names that would have been understood.
    """
    short, full = dict.fromkeys(entry for _, entry in paths), [".".join(path) for path in paths]
    hint = did_you_mean(name, [*full, *short, *also] if "." in name else [*short, *also, *full])
    if not full:
        return f"{hint}Nothing has been logged yet."
    rest = len(full) - _MOST_LISTED
    return f"{hint}Logged: {', '.join(full[:_MOST_LISTED])}{f' and {rest} more' if rest > 0 else ''}."


def require_name(caller: str, name: Any, what: str = "names") -> None:
    """Refuse anything that cannot be the name of an entry."""
    if not isinstance(name, str) or not name:
        raise TypeError(f'{caller} needs {what} as "name" or "collection.name". Got {describe_value(name)}.')


def _flatten(value: Logs) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    if len(value) == 1:  # as most often, and at every step
        return list(value.values()), tuple(value)
    collections = tuple(sorted(value))
    return [value[collection] for collection in collections], collections


def _flatten_with_keys(value: Logs) -> tuple[list[tuple[Any, dict[str, Any]]], tuple[str, ...]]:
    children, collections = _flatten(value)
    keys = map(jax.tree_util.DictKey, collections)
    return list(zip(keys, children, strict=True)), collections


def _unflatten(collections: tuple[str, ...], children: Any) -> Logs:
    if len(collections) == 1:
        logs = Logs()
        logs[collections[0]] = children[0]
        return logs
    return Logs(zip(collections, children, strict=True))


jax.tree_util.register_pytree_with_keys(Logs, _flatten_with_keys, _unflatten, _flatten)
