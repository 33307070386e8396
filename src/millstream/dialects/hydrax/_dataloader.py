"""Training and validation batches in one stream."""

import time
import types
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np

import millstream as ms
from millstream.dialects.hydrax._batch import Batch, TrainingBatch, ValidationBatch, require_layouts
from millstream.dialects.hydrax._computed_cache import Cachers
from millstream.dialects.hydrax._data_group import DataGroup, Layouts
from millstream.dialects.hydrax._group_loader import GroupLoader, Reading
from millstream.reading.dtypes import to_jax_dtype
from millstream.reading.interrupts import OneThread
from millstream.text.errors import describe_value, require_callable, require_choice, require_int

D = TypeVar("D")
_YEAR = 365 * 86_400.0
_KEY = np.zeros(2, np.uint32)  # of all runs; seeds of groups enter by the names of their loaders


def when_and_what(validation: Any) -> tuple[Any, list[DataGroup[Any]]]:
    """When validation comes, and what of."""
    if validation is None:
        return ("epoch", 1), []
    if not isinstance(validation, tuple | list) or len(validation) != 3:
        raise ValueError(
            'Dataloader needs validation=("epoch", n, groups) or ("batch", n, groups). '
            f"Got {describe_value(validation)}."
        )
    return period_of("validation", validation[:2], least=1), groups_of("validation", validation[2])


def period_of(name: str, period: Any, *, least: int) -> tuple[str, int]:
    """That many epochs or batches."""
    if not isinstance(period, tuple | list) or len(period) != 2 or period[0] not in ("epoch", "batch"):
        raise ValueError(f'Dataloader needs {name} to begin with "epoch" or "batch", n. Got {describe_value(period)}.')
    require_int("Dataloader", f"the number of {name}", period[1], least=least)
    return period[0], period[1]


def end_of(end_at: Any) -> tuple[str, int] | None:
    """Where to stop; None continues."""
    if (
        end_at is None
        or end_at == "never"
        or (isinstance(end_at, tuple | list) and end_at[:1] in (("never",), ["never"]))
    ):
        return None
    return period_of("end_at", end_at, least=0)


def require_start(start_at: Any) -> None:
    """Refuse what is not a place to start at."""
    if not isinstance(start_at, tuple | list) or len(start_at) != 2:
        raise ValueError(f"Dataloader needs start_at=(epoch, further batches). Got {describe_value(start_at)}.")
    for name, number in zip(("epoch", "batch"), start_at, strict=True):
        require_int("Dataloader", f"the {name} of start_at", number, least=0)


def groups_of(what: str, groups: Any) -> list[DataGroup[Any]]:
    """One group or several, as a list."""
    listed = [groups] if isinstance(groups, DataGroup) else list(groups) if isinstance(groups, Iterable) else [groups]
    if not listed or not all(isinstance(group, DataGroup) for group in listed):
        raise TypeError(f"Dataloader needs {what} to be a DataGroup, or several. Got {describe_value(groups)}.")
    return listed


def named(groups: list[DataGroup[Any]]) -> dict[str, DataGroup[Any]]:
    """Groups under names with their seeds, from which their keys are made. Two of the same seed have two names."""
    named: dict[str, DataGroup[Any]] = {}
    for group in groups:
        same = sum(other.seed == group.seed for other in named.values())
        named[f"group with seed {group.seed}" + (f" ({same + 1})" if same else "")] = group
    return named


def require_numbers(**numbers: tuple[Any, int]) -> None:
    """Refuse numbers below their least."""
    for name, (number, least) in numbers.items():
        require_int("Dataloader", name, number, least=least)


def require_functions(**functions: Any) -> None:
    """Refuse what cannot be called; only the loader has to be there."""
    for name, function in functions.items():
        if function is not None or name == "loader_func":
            require_callable("Dataloader", name, function)


def require_enough(loaders: int, cachers: int, groups: list[DataGroup[Any]]) -> None:
    """Refuse to load without a process, or to store without a thread."""
    if not loaders and any(group.loader_layouts is not None for group in groups):
        raise ValueError("Dataloader needs a loader_count of at least 1, unless no DataGroup has loader_arrays.")
    if not cachers and any(group.computes_cache and not group.cache_readonly for group in groups):
        raise ValueError("Dataloader needs a cacher_count of at least 1, unless all caches are read-only.")


if TYPE_CHECKING:
    from millstream.loader.train_stream import StreamItem, StreamIterator


class Dataloader(Generic[D]):
    """Batches for training and for validation, filled by loader processes. It is used in a `with` block, once.

    Example:
        >>> from millstream.dialects.hydrax import DataGroup, Dataloader
        >>> def load(number, arrays, seed):
        ...     arrays["x"][:] = number if seed is None else number + seed % 2
        >>> arrays = {"x": ((3,), np.uint8, jnp.float32)}
        >>> train = DataGroup(4, range(10), loader_arrays=arrays)
        >>> valid = DataGroup(4, range(4), loader_arrays=arrays)
        >>> with Dataloader(load, train, validation=("epoch", 1, valid), end_at=("epoch", 2)) as dataloader:
        ...     print(["train" if batch.is_training else "validate" for batch in dataloader])
        ['train', 'train', 'validate', 'train', 'train', 'validate']

    Args:
        loader_func: `loader_func(descriptor, arrays, seed)` fills the arrays of one item, which are zeros, in a loader
            process. It may return a dict of plain values. `seed` has 32 bits, and is None in validation.
        training: A `DataGroup`, or several. An epoch is a pass through all of them.
        validation: ("epoch" or "batch", n, group or groups): a pass, with one group after the other, after every n
            epochs or training batches.
        depth: How many batches are made ahead, with the one that is in use.
        loader_count: Loader processes of each group. 0 if all batches come from caches.
        loader_nice: Niceness relative to this process.
        cacher_count: Threads that store what `batch.cache` is given. 0 if no cache is written to.
        start_at: (epoch, further batches) to skip. Validation that is due before it is skipped, too.
        end_at: ("epoch" or "batch", n) to stop before, counted from the beginning. None or ("never", 0) continues.
        interleave_groups: Whether groups take turns in training, spread evenly; False has one come after the other.
        deterministic: False permits batches to overtake others; they come in their order all the same.
        timeout_sec: Seconds without a batch that are a `BatchTimeoutError`; 0 or less for none.
        startup_func: Called once in each loader process.
        placement_func: `placement_func(numpy_arrays, layouts, additional, group)` places a batch on devices and returns
            its JAX arrays by name.
        on_error: What a loader that raises does: "skip batch" leaves its batch out, with a warning; "raise" raises it
            in your loop.
        debug: Call the loader twice for every item, and warn on stderr if it leaves elements unwritten or keeps views.
    """

    def __init__(
        self,
        loader_func: Callable[[D, Any, int | None], dict[str, Any] | None],
        training: DataGroup[D] | Iterable[DataGroup[D]],
        *,
        validation: tuple[str, int, DataGroup[D] | Iterable[DataGroup[D]]] | None = None,
        depth: int = 3,
        loader_count: int = 1,
        loader_nice: int = 0,
        cacher_count: int = 1,
        start_at: tuple[int, int] = (0, 0),
        end_at: tuple[str, int] | None = None,
        interleave_groups: bool = True,
        deterministic: bool = True,
        timeout_sec: float = 60,
        startup_func: Callable[[], object] | None = None,
        placement_func: Callable[..., Any] | None = None,
        on_error: str = "skip batch",
        debug: bool = False,
    ) -> None:
        if ms.reading.is_worker():
            raise RuntimeError(
                "Dataloader cannot be made in a loader process. Guard it with: if __name__ == '__main__':"
            )
        require_numbers(depth=(depth, 1), loader_count=(loader_count, 0), cacher_count=(cacher_count, 0))
        require_functions(loader_func=loader_func, startup_func=startup_func, placement_func=placement_func)
        require_choice("Dataloader", "on_error", on_error, ("skip batch", "raise"))
        require_start(start_at)
        self._end_at: Any = end_of(end_at)
        train, (every, valid) = groups_of("training", training), when_and_what(validation)
        require_enough(loader_count, cacher_count, [*train, *valid])
        executor = _processes(loader_count, startup_func, loader_nice, timeout_sec)
        # Rows of items that fail are masked, and the batch is left out here, where it can be told why.
        tolerance = "skip item" if on_error == "skip batch" else "raise"
        reading = Reading(loader_func, executor, depth - 1, tolerance, debug, placement_func is not None)
        self._train = {name: GroupLoader(group, reading, training=True) for name, group in named(train).items()}
        self._valid = {name: GroupLoader(group, reading, training=False) for name, group in named(valid).items()}
        validated = _mixed(self._valid, interleave=False) if valid else None
        mixed = _mixed(self._train, interleave=interleave_groups)
        self._stream = ms.loader.TrainStream(mixed, validation=validated, every=every)
        self._state = self._stream.init_state(_KEY, start_at)
        self._first = start_at[0] * self.batches_per_epoch + start_at[1]
        self._last = None if self._end_at is None else self._batches(self._end_at)
        self._skipped = self._first // self._batches(every)
        self._deterministic = deterministic
        self._placement_func = placement_func
        self._cachers = Cachers(cacher_count)
        self._items: StreamIterator | None = None
        self._closed = self._begun = self._interrupted = False
        self._one_thread = OneThread("Dataloader")
        self._dropped = 0
        self._idle = 0.0

    @property
    def batches_per_epoch(self) -> int:
        """Training batches of an epoch."""
        return self._stream.batches_per_epoch

    @property
    def batches_per_validation(self) -> int:
        """Batches of a validation pass; 0 without validation."""
        return self._stream.batches_per_validation

    @property
    def first_batch(self) -> int:
        """The number of the first training batch."""
        return self._first

    @property
    def last_batch(self) -> int | None:
        """The number of the training batch to stop before; None if there is no end."""
        return self._last

    @property
    def deterministic(self) -> bool:
        """What was asked for; the order of batches is the same always."""
        return self._deterministic

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C or `interrupt()` has ended it."""
        return self._interrupted or (self._items is not None and self._items.interrupted)

    def interrupt(self) -> None:
        """Hand out no further batches."""
        self._interrupted = True

    def idle_usec(self) -> int:
        """Microseconds that the loop has waited for batches since this was last asked, the first batch left out."""
        idle, self._idle = self._idle, 0.0
        return round(1e6 * idle)

    def __enter__(self) -> Self:
        if self._items is not None or self._closed:
            raise RuntimeError("Dataloader can be used in one `with` block, once. Make another one, with start_at.")
        self._items = self._stream.iterate(self._state, end_at=self._end_at, with_info=True)
        self._items.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._closed = True
        assert self._items is not None
        try:
            self._items.__exit__(kind, error, trace)
        finally:
            self._cachers.close()

    def __iter__(self) -> Self:
        self._open_items()
        return self

    def __next__(self) -> Batch[D]:
        with self._one_thread:
            return self._draw_next()

    def _draw_next(self) -> Batch[D]:
        items, begun = self._open_items(), time.perf_counter()
        while True:
            if self._interrupted:
                raise StopIteration
            item = next(items)
            assert item.info is not None
            if not item.info.failed:
                break
            self._drop(item)
        self._dropped = 0
        batch = self._batch(item)
        if self._begun:
            self._idle += time.perf_counter() - begun
        self._begun = True
        return batch

    def _open_items(self) -> "StreamIterator":
        if self._items is None or self._closed:
            raise RuntimeError("Dataloader needs a `with` block around its loop: with dataloader: for batch in ...")
        return self._items

    def _batches(self, period: tuple[str, int]) -> int:
        return period[1] * self.batches_per_epoch if period[0] == "epoch" else period[1]

    def _drop(self, item: "StreamItem") -> None:
        """Leave out a batch whose loader has raised; if all do, there is no end to it."""
        assert item.info is not None
        row, error = next(iter(item.info.failed.items()))
        kind = "training" if item.training else "validation"
        text = f"{type(error).__name__}: {error}"
        notes = "\n".join(getattr(error, "__notes__", ()))
        warnings.warn(
            f"Dataloader leaves out {kind} batch {item.info.step}: the loader raised {text} for item "
            f"{item.info.indices[row]}.\n{notes}",
            RuntimeWarning,
            stacklevel=3,
        )
        self._dropped += 1
        if self._dropped >= self.batches_per_epoch + self.batches_per_validation:
            raise RuntimeError(
                f"Dataloader has left out the last {self._dropped} batches, as many as an epoch has: the loader raises "
                "every time. Its last error is the cause of this one."
            ) from error

    def _batch(self, item: "StreamItem") -> Batch[D]:
        info = item.info
        assert info is not None and info.group is not None
        source = (self._train if item.training else self._valid)[info.group]
        group, computed = source.group, source.computed
        stored = None if computed is None else computed.read(info)
        arrays, additional = (item.batch, info.additional) if stored is None else stored
        uncached = stored is None and (group.cache_location is None or group.computes_cache)
        layouts = group.loader_layouts if uncached else group.cache_layouts
        assert layouts is not None
        arrays = {name: arrays[name] for name in layouts}  # in the order they were declared in
        if self._placement_func is not None:
            arrays = self._placed(arrays, layouts, additional, group)
        elif stored is not None:
            arrays = _on_device(arrays, layouts)

        def store(*what: Any) -> None:
            assert computed is not None
            self._cachers.store(computed, *what)

        parts = group, info, arrays, additional, uncached, store
        if item.training:
            return TrainingBatch(*parts)
        skipped = self._skipped * self.batches_per_validation
        return ValidationBatch(*parts, skipped_passes=self._skipped, skipped_batches=skipped)

    def _placed(self, arrays: Any, layouts: Layouts, additional: Any, group: DataGroup[D]) -> Any:
        assert self._placement_func is not None
        on_host = types.MappingProxyType({name: np.asarray(array) for name, array in arrays.items()})
        placed = self._placement_func(on_host, layouts, types.MappingProxyType(additional), group)
        require_layouts("placement_func", placed, layouts)
        return placed


def _on_device(arrays: dict[str, np.ndarray], layouts: Layouts) -> dict[str, Any]:
    import jax.numpy as jnp

    return {
        name: jnp.asarray(to_jax_dtype(f"arrays[{name!r}]", arrays[name]), layout.jax_dtype)
        for name, layout in layouts.items()
    }


def _mixed(loaders: dict[str, GroupLoader], *, interleave: bool) -> "ms.loader.MixedLoader":
    return ms.loader.MixedLoader({name: source.loader for name, source in loaders.items()}, interleave=interleave)


def _processes(count: int, startup: Any, nice: int, timeout: float) -> "ms.Processes | None":
    if not count:
        return None
    return ms.Processes(count, startup=startup, nice=nice, timeout=float(timeout) if timeout > 0 else _YEAR)
