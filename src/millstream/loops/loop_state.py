"""What a loop knows while it runs, and what it returns."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import jax
from jax.typing import ArrayLike

from millstream.loops._aggregate import concatenate
from millstream.loops._history import History
from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import Logs
from millstream.loops.schedules import Epochs, Period, Schedule
from millstream.loops.skips import Skips
from millstream.reading.contracts import PyTree
from millstream.reading.memory import nbytes
from millstream.text import html
from millstream.text.errors import describe_value
from millstream.text.summaries import never_raising, value_text
from millstream.text.tables import size_text, time_text

if TYPE_CHECKING:
    from millstream.loops._tasks import Task
    from millstream.loops._weights import SampleWeights
    from millstream.loops.callback import Callback

S = TypeVar("S")


@never_raising
def state_text(state: Any) -> str:
    """A state by its type and its size, and a small one of plain containers by its arrays; never its values."""
    leaves = jax.tree.leaves(state)
    arrays = [leaf for leaf in leaves if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    if (len(leaves) <= 4 and isinstance(state, dict | list | tuple)) or not arrays or arrays[0] is state:
        return value_text(state)
    return f"{type(state).__name__} of {len(arrays):,} arrays, {size_text(nbytes(arrays))}"


def run_rows(state: Any, elapsed: Elapsed) -> list[tuple[str, str]]:
    """How far a run is and what its state is, for a table."""
    counts = {"step": elapsed.steps, "epoch": elapsed.epochs, "sample": elapsed.samples}
    done = [f"{n:,} {what}{'' if n == 1 else 's'}" for what, n in counts.items() if n is not None]
    return [("done", f"{', '.join(done)} in {time_text(elapsed.time)}"), ("state", state_text(state))]


class _Returned(NamedTuple, Generic[S]):
    state: S
    history: History
    elapsed: Elapsed


class LoopOutput(_Returned[S]):
    """What a loop returns: state, history and elapsed, and as attributes what else is of use.

    Example:
        >>> output = ms.loop(0, range(3), {ms.every(1): lambda state: state + 1})
        >>> state, history, elapsed = output
        >>> state, output.reason
        (3, 'the data ended')

    Attributes:
        data_state: The state of the loader to resume from; None if the data do not come from a loader, or if batches
            had overtaken others, as they may with `ordered=False`.
        reason: Why the loop ended, in words.
        interrupted: Whether it was by Ctrl-C or SIGTERM.
    """

    data_state: PyTree = None
    reason: str = ""
    interrupted: bool = False

    @property
    def outputs(self) -> dict[str, PyTree]:
        """What was logged with `add_output`: the arrays of all batches joined, without padding."""
        columns, weights = self.history.columns(), self.history.weights()
        return {
            name: concatenate(column.since(0), [weights[row] for row in column.rows])
            for (collection, name), column in columns.items()
            if collection == "outputs"
        }

    def __repr__(self) -> str:
        reason = f", {self.reason!r}" if self.reason else ""
        return f"LoopOutput({state_text(self.state)}, {self.history}, {self.elapsed}{reason})"

    @html.never_raising
    def _repr_html_(self) -> str:
        ended = [("ended", self.reason)] if self.reason else []
        return html.html_names([*run_rows(self.state, self.elapsed), *ended]) + self.history._repr_html_()


@dataclasses.dataclass(eq=False)
class Waits:
    """Seconds that a loop has spent waiting, or with something else than training.

    Attributes:
        data: Waiting for batches.
        evaluation: In loops inside this one.
        callbacks: In bars, writers, checkpoints and other observers.
    """

    data: float = 0.0
    evaluation: float = 0.0
    callbacks: float = 0.0


@dataclasses.dataclass(eq=False)
class LoopState:
    """What a loop knows while it runs; a callback gets it as its fourth argument.

    Example:
        >>> def stop_at_three(state, batch, elapsed, loop_state):
        ...     if state == 3:
        ...         loop_state.stop("it was three")
        >>> state, _, elapsed = ms.loop(0, range(10), {ms.loops.always(): [lambda state: state + 1, stop_at_three]})
        >>> elapsed.steps
        3

    Attributes:
        state: The state, such as a model and its optimizer; replaced by what callbacks return.
        batch: The current batch.
        elapsed: How far the run is.
        logs: What this step has logged so far.
        history: What earlier steps have logged.
        metadata: Whatever the caller of the loop gave.
        name: "loop", "train", "test" or "predict".
        stop_iteration: Whether the loop ends after this step.
        reason: Why it does.
        parent: The state of the loop around this one; None for an outermost one.
        waits: What time is spent on besides steps.
        ends_at: The point at which the loop stops, if it is one.
        epochs: Where its epochs end; None if they are not given in steps.
        callbacks: All stateful callbacks of the loop.
        dataset: What the batches come from: a loader or an iterable.
        tasks: What is done when.
        stops: When the loop stops; None if not given.
        failed: Whether the loop broke off in the middle of a step.
        unfinished: The first task of this step that an interrupt kept from being done, and whether it was one of those
            at the end of the run; None if there is none.
        cut_short: Whether an interrupt has ended a loop inside the current callback.
        sample_weights: The weights that samples are drawn by; None if the loader does not draw by weight.
        data_position: Gives `data_state`.
        position: Gives where the run is in its data, as it is saved.
        skips: The batches that the run leaves out; `skips.batch_of(step)` is the number of the batch that a step has.
    """

    state: PyTree
    history: History
    elapsed: Elapsed
    batch: PyTree = None
    logs: Logs = dataclasses.field(default_factory=Logs)
    metadata: Any = None
    name: str = "loop"
    stop_iteration: bool = False
    reason: str = ""
    parent: "LoopState | None" = None
    waits: Waits = dataclasses.field(default_factory=Waits)
    ends_at: Period | None = None
    epochs: Epochs | None = None
    callbacks: "list[Callback]" = dataclasses.field(default_factory=list)
    dataset: object = None
    tasks: "list[Task]" = dataclasses.field(default_factory=list)
    stops: Period | Schedule | None = None
    failed: bool = False
    unfinished: tuple[int, bool] | None = None
    cut_short: bool = False
    sample_weights: "SampleWeights | None" = None
    data_position: Callable[[], PyTree] = lambda: None
    position: Callable[[], tuple[dict[str, PyTree], PyTree]] = lambda: ({"kind": "iterable"}, None)
    skips: Skips = dataclasses.field(default_factory=Skips)

    @property
    def data_state(self) -> PyTree:
        """The state of the loader after the current batch; None if the data do not come from a loader."""
        return self.data_position()

    @property
    def is_complete(self) -> bool:
        """Whether the run has come to its stop or to the end of its data: no error, interrupt or callback ended it."""
        return not self.failed and not self.stop_iteration and self.reason not in ("interrupted", "terminated")

    @property
    def accumulated_logs(self) -> Logs:
        """The newest value of everything that was ever logged, this step included."""
        return self.history.latest().merge(self.logs)

    def stop(self, reason: str = "a callback stopped it") -> None:
        """End the loop after this step."""
        self.stop_iteration = True
        self.reason = reason

    def set_weights(self, weights: ArrayLike) -> None:
        """Draw samples by other weights from the next step on, such as more often those that were hard.

        The loader is one of a weighted view. The weights are saved with the run, so it resumes exactly. What the steps
        so far have drawn stays as it was.

        Example:
            >>> view = ms.views.weighted(ms.ArraySampleSource({"x": np.arange(4)}), [1, 1, 1, 1])
            >>> loader = ms.DataLoader([view, ms.BatchTransform(4)])
            >>> def mine(state, batch, elapsed, loop_state):
            ...     loop_state.set_weights([0, 0, 1, 1])
            >>> def note(state, batch):
            ...     return [*state, sorted(batch[0]["x"].tolist())]
            >>> tasks = {ms.every(1): note, ms.at(1): mine}
            >>> ms.loop([], loader, tasks, stop=2, key=jax.random.key(0)).state
            [[0, 1, 2, 3], [2, 2, 3, 3]]

        Args:
            weights: A number per sample, as for `ms.views.weighted`.
        """
        if self.sample_weights is None:
            raise TypeError(
                "set_weights needs a loop over a loader that draws by weight: DataLoader([ms.views.weighted(source, "
                f"weights), ms.BatchTransform(64)]). This one is over {describe_value(self.dataset)}."
            )
        self.sample_weights.set(weights, self.elapsed.steps)

    def __repr__(self) -> str:
        parts = [self.name, state_text(self.state), repr(self.elapsed), repr(self.logs), repr(self.history)]
        return f"LoopState({', '.join(parts)})"


def is_nested_in(loop_state: LoopState, outer: LoopState | None) -> bool:
    """Whether a loop runs inside another one; of none, if that is None."""
    parent = loop_state.parent
    while parent is not None and parent is not outer:
        parent = parent.parent
    return parent is not None
