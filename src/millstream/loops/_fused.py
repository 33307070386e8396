"""Several steps as one program."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millstream.loops._acting import Acting
from millstream.loops._dataset import Loader, loader_state
from millstream.loops._returned import absorb
from millstream.loops._tasks import Task
from millstream.loops.callback import arguments, bind
from millstream.loops.elapsed import INT32_LIMIT, Elapsed
from millstream.loops.history import History
from millstream.loops.logs import Logs
from millstream.loops.loop_state import LoopState
from millstream.pipeline.placement import readable
from millstream.pipeline.static_part import is_number
from millstream.text.errors import describe_value, table

_MOST_ROWS = 2**30  # of the batches of a program, if nobody knows how many rows count


class Carry(NamedTuple):
    """What a program hands from step to step: the state, and the elapsed with the last step if a step sees them."""

    state: Any
    timing: Any


class Body:
    """Compiled steps, one after the other, as the body of a scan. Equal if the steps are, so programs are found again.

    Args:
        tasks: Whose callbacks are traced.
        epoch: How long an epoch is, as unit and number.
    """

    def __init__(self, tasks: list[Task], epoch: tuple[str, float] | None) -> None:
        self._steps = tuple(getattr(task.callback, "traced", task.callback) for task in tasks)
        self._epoch = epoch
        # Carrying the elapsed costs more than most steps, so it is only done for those who can see it.
        self.times = any(
            hasattr(step, "__loop_callback__") or arguments(task.name, step) > 2
            for task, step in zip(tasks, self._steps, strict=True)
        )
        self._calls = [(bind(task.name, step), task.name) for task, step in zip(tasks, self._steps, strict=True)]

    def __hash__(self) -> int:
        return hash((self._steps, self._epoch))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Body) and (self._steps, self._epoch) == (other._steps, other._epoch)

    def __call__(self, carry: Carry, batch: Any, mask: jax.Array) -> tuple[Carry, Logs]:
        state, timing = carry
        elapsed = self._after(timing[0], timing[1], mask) if self.times else Elapsed()
        loop_state = LoopState(state, History(), elapsed, (batch, mask))
        for call, name in self._calls:
            before = jax.tree.leaves_with_path(loop_state.state)  # taken now: a module may be changed in place
            output = call(loop_state)
            if output is not None:
                absorb(loop_state, output, name)
            _refuse_new_numbers(name, before, loop_state.state)
        return Carry(loop_state.state, (elapsed, timing[1]) if self.times else None), loop_state.logs

    def _after(self, before: Elapsed, last: jax.Array, mask: jax.Array) -> Elapsed:
        """How far the run is one step later."""
        count: Any = before.samples
        steps, samples = before.steps + 1, count + jnp.sum(mask, dtype=jnp.int32).astype(count.dtype)
        elapsed = before.replace(steps=steps, samples=samples, samples_before=count, final=steps == last)
        if self._epoch is None or self._epoch[0] not in ("steps", "samples"):
            return elapsed
        reached = getattr(elapsed, self._epoch[0])
        epochs = (reached // jnp.asarray(self._epoch[1], reached.dtype)).astype(jnp.int32)
        starts = (before.epochs != before.epochs_before) | (before.steps == 0)
        return elapsed.replace(epochs=epochs, epochs_before=before.epochs, starts_epoch=starts)


class _WithMask(NamedTuple):
    """The steps of a body, which also say the mask of each batch."""

    body: Body

    def __call__(self, carry: Any, batch: Any, mask: jax.Array) -> tuple[Any, tuple[Logs, jax.Array]]:
        carry, logs = self.body(carry, batch, mask)
        return carry, (logs, mask)


def _refuse_new_numbers(name: str, before: list[tuple[Any, Any]], after: Any) -> None:
    """Refuse a step that makes a Python number of another, as eqx.filter_jit allows: done once, it would be wrong."""
    changed = [
        (f"state{jax.tree_util.keystr(path)}", f"{describe_value(old)} became {describe_value(new)}")
        for (path, old), new in zip(before, jax.tree.leaves(after), strict=False)
        if is_number(old) and is_number(new) and (type(old), repr(old)) != (type(new), repr(new))
    ]
    if changed:
        raise TypeError(
            f"fuse= runs several steps as one program, which can change arrays and no Python numbers. {name} changed:\n"
            f"{table(changed)}\nKeep in the state what a step changes as an array, such as jnp.asarray(0)."
        )


class FusedData:
    """A loader whose batches are made and used inside of programs of several steps.

    Args:
        who: Who speaks in errors.
        loader: The loader.
        key: The key of its run.
        data_state: The state to begin with, instead of a key.
        start: How far the run is.
        last: Its last step; infinity if that is not known.
        width: The most steps per program.
        acting: Sets the policy before each batch; None if there is none to set.

    Attributes:
        state: The loader's state after the last program.
        mask: None: callbacks of such a run see no batch.
        masks: Those of the batches of the last program, if a stage sets them; they are read when it has ended.
    """

    mask = None

    def __init__(
        self,
        who: str,
        loader: Any,
        key: Any,
        data_state: Any,
        start: Elapsed,
        last: float,
        width: int,
        acting: Acting | None,
    ) -> None:
        if not isinstance(loader, Loader) or not hasattr(loader, "run_steps"):
            raise TypeError(
                f"{who} can fuse steps only over a DataLoader, whose batches a program can make for itself. "
                f"Got {describe_value(loader)}. Leave fuse out."
            )
        self._who = f"{who} with fuse={width}"
        self._loader: Any = loader
        self._before_fn = None if acting is None else acting.before
        self._last = np.int32(last if last < INT32_LIMIT else 0)
        self._width = width
        state = loader_state(who, loader, key, data_state, start.steps)
        self._samples_at = self._loader.sample_counter(state)
        self._drawn = 0
        self.masks: np.ndarray | None = None
        self.state = state

    def samples(self, count: int) -> list[int]:
        """How many samples each of the next steps has."""
        if self._samples_at is None:
            if self._before_fn is not None:
                raise ValueError(
                    f"{self._who} cannot count samples ahead: a stage sets the mask, and the policy that makes the "
                    "next batches is not known yet. Give schedules and stop= in steps or epochs, or leave fuse out."
                )
            return self._loader.count_samples(self.state, count, width=self._width)
        return self._samples_at(range(self._drawn, self._drawn + count))

    def run(self, body: Body, state: Any, now: Elapsed, count: int) -> tuple[Any, Logs, list[int]]:
        """Some steps; the state after them, what they logged (a row for each, and unused ones), and their samples."""
        samples = [_MOST_ROWS] if self._samples_at is None else self.samples(count)
        carry = Carry(state, (_as_carry(now, now.samples + sum(samples)), self._last) if body.times else None)
        steps: Any = _WithMask(body) if self._samples_at is None else body
        self.state, (state, _), logs = self._loader.run_steps(
            self.state, carry, steps, count, width=self._width, before_fn=self._before_fn, who=self._who
        )
        self._drawn += count
        if self._samples_at is None:
            logs, masks = logs
            self.masks = masks = np.asarray(readable(masks))[:count]
            samples = np.count_nonzero(masks.reshape(count, -1), axis=1).tolist()
        return state, logs, samples

    def close(self) -> None:
        """End the reading that programs have begun."""
        self._loader.end_steps()


def _as_carry(now: Elapsed, samples: int) -> Elapsed:
    """An elapsed whose numbers have the types that they keep inside of a program, up to so many samples."""
    kind: Any = np.int32 if samples < INT32_LIMIT else np.float32
    epochs, epochs_before = (None if count is None else np.int32(count) for count in (now.epochs, now.epochs_before))
    numbers: list[Any] = [
        np.int32(now.steps),
        kind(now.samples),
        epochs,
        np.float32(now.time),
        np.float32(now.date_start),
        kind(now.samples_before),
        epochs_before,
        np.float32(now.time_before),
        np.bool_(now.starts_epoch),
        np.bool_(False),
    ]
    return Elapsed(*numbers)
