"""A loop inside a loop, whose history becomes one row of the outer one."""

import weakref
from collections.abc import Callable
from typing import Any, TypedDict, Unpack, overload

from millstream.loops._aggregate import Aggregation, Aggregations
from millstream.loops._history import History
from millstream.loops.callback import Callback
from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import Logs
from millstream.loops.loop_state import LoopState, S
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value, function_name, require_bool

Inner = Callable[[PyTree], tuple[PyTree, History, Elapsed]]


class InnerLoop(Callback):
    """Runs a loop and logs what came of it; made by `inner_loop`, which says what the arguments are."""

    def __init__(self, name: Any, fn: Any, output_state: bool, aggregation: Any) -> None:
        if not callable(fn):
            raise TypeError(
                "inner_loop needs a function of the state that runs a loop and returns what it returned: "
                f"inner_loop('test', lambda state: ms.test_loop(state, ...)). Got {describe_value(fn)}."
            )
        if not isinstance(name, str | None):
            raise TypeError(f"inner_loop needs a name, and then a function. Got {describe_value(name)} as the name.")
        require_bool("inner_loop", "output_state", output_state)
        self._fn = fn
        self._suffix = "" if name is None else f"_{name}"
        self._output_state = output_state
        self._aggregation = Aggregation("inner_loop" if name is None else f"inner_loop {name!r}", aggregation)
        self._counted: weakref.WeakKeyDictionary[History, tuple[int, int]] = weakref.WeakKeyDictionary()

    def __loop_callback__(self, loop_state: LoopState) -> Any:
        logs, state = self(loop_state.state)
        return logs, state if self._output_state else None

    def __call__(self, state: S) -> tuple[Logs, S]:
        """Run it by hand.

        Args:
            state: For the inner loop.

        Returns:
            What it logged, as one row, and its state if that was asked for, else the given one.
        """
        output = self._fn(state)
        if not isinstance(output, tuple) or len(output) != 3 or not isinstance(output[1], History):
            raise TypeError(
                "inner_loop needs its function to return what a loop returns, (state, history, elapsed). "
                f"Got {describe_value(output)}."
            )
        inner_state, history, _ = output
        # A function may continue with one history, call after call; earlier rows have been logged already.
        media = history.media
        start, shown = self._counted.get(history, (0, 0))
        self._counted[history] = len(history), media.count
        interrupted = getattr(output, "interrupted", False)
        logs = Logs() if interrupted else self._aggregation(history, start)
        for item in [] if interrupted else reversed(media.since(shown)):
            collection, name = item.path
            logs.add_entry(collection, name, item.read())  # of several, the first stays
        named = Logs()
        for (collection, name), value in logs.entries():
            named.add_entry(collection, name + self._suffix, value)
        return named, inner_state if self._output_state else state

    def __repr__(self) -> str:
        return f"inner_loop({self._suffix[1:] or None!r}, {function_name(self._fn)})"


class InnerLoopOptions(TypedDict, total=False):
    """The options of `inner_loop`."""

    output_state: bool
    aggregation: Aggregations | None


@overload
def inner_loop(name: Inner, /, **options: Unpack[InnerLoopOptions]) -> InnerLoop: ...
@overload
def inner_loop(name: str, fn: Inner, **options: Unpack[InnerLoopOptions]) -> InnerLoop: ...
def inner_loop(name: Any, fn: Any = None, *, output_state: bool = False, aggregation: Any = None) -> InnerLoop:
    """Run a loop at a step of another one, and log what came of it there, as one row.

    Example:
        >>> def test_step(state, batch):
        ...     return ms.logs().add_metric("loss", batch.mean())
        >>> def test(state):
        ...     return ms.loop(state, [np.zeros(4), np.ones(1)], {ms.every(1): test_step})
        >>> evaluate = ms.inner_loop("test", test)
        >>> logs, state = evaluate(None)  # or in a loop: {ms.every(100): evaluate}
        >>> logs.metrics.loss_test
        0.2

    Stateful metrics stand for all batches so far, so their last value counts. Outputs are dropped: joined again at
    every test they would fill the history of a training run; `aggregation={"outputs": "concatenate"}` keeps them,
    without padding. Of images and histograms, those of the first batch are logged. Everything else is averaged,
    weighted by samples. An interrupted loop logs nothing, because a part of the data would pass for all of them; the
    loop around it is interrupted, too.

    Args:
        name: What its entries are called: `loss` becomes `loss_test`. It can be left out; names stay as they are then.
        fn: A function of the state that runs a loop and returns what that returned.
        output_state: Whether the inner loop's state replaces the outer one's.
        aggregation: How the rows of an entry become one value: "mean", "last", "first", "sum", "min", "max",
            "concatenate", "drop", or a function of (values) or (values, weights), where weights are samples. One for
            all entries, or a dict by collection, "name" or "collection.name"; what it does not list is as above.
    """
    if fn is None and not isinstance(name, str):
        name, fn = None, name
    return InnerLoop(name, fn, output_state, aggregation)
