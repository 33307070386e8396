"""Steps that are done several at a time, unfused: nobody may be able to tell, but by the clock."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu import metrics
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.loops import _burst

pytestmark = pytest.mark.optimized


@jax.jit
def step(state, batch):
    return {"loss": state + batch.sum()}, state + 1


@jax.jit
def silent(state, batch):
    return state + batch.sum()


@jax.jit
def in_collections(state, batch):
    return ms.logs().add_loss("loss", state).add_metric("mean", batch.mean()).add_entry(
        "mine", "x", batch[0]
    ), state + 1


def one_by_one(compiled):
    """The same step, of which the loop does not know that it is compiled."""
    return lambda state, batch: compiled(state, batch)


def batches(count, width=2):
    return [np.full(width, number, np.float32) for number in range(count)]


@pytest.fixture
def bursts(monkeypatch):
    """How many steps each burst had, if none is cut short because the machine is slow."""
    monkeypatch.setattr(_burst, "_MOST_SECONDS", 60)
    lengths = []
    run = _burst.StepBurst.run

    def counted(self, *args):
        try:
            return run(self, *args)
        finally:
            lengths.extend([len(self.logs)] if args[2] is not None else [])

    monkeypatch.setattr(_burst.StepBurst, "run", counted)
    return lengths


def told(history):
    """All that a history says but the times."""
    columns = history.to_dict()
    return {name: values for name, values in columns.items() if name not in ("time", "date")}


SCHEDULES = {
    "every 1": lambda: ms.every(1),
    "every 3": lambda: ms.every(3),
    "every 7": lambda: ms.every(7),
    "every epoch": lambda: ms.every(epochs=1),
    "at 5": lambda: ms.at(5),
    "at epoch 2": lambda: ms.at(epochs=2),
    "last": lambda: ms.loops.last(),
    "never": lambda: ms.never(),
    "samples": lambda: ms.every(samples=6),
    "after": lambda: ms.after(9).every(2),
    "or": lambda: ms.every(5) | ms.at(8),
}


@settings(max_examples=60, deadline=None)
@given(
    chosen=st.lists(st.sampled_from(list(SCHEDULES)), max_size=3),
    compiled=st.sampled_from([step, silent, in_collections]),
    stop=st.sampled_from([None, 13, ms.at(epochs=3), ms.at(17, epochs=2), lambda elapsed: elapsed.steps >= 9]),
    epoch=st.sampled_from([None, 4, ms.at(samples=10)]),
    stops_at=st.sampled_from([None, 6, 12]),
)
def test_a_run_is_the_same_as_one_by_one(chosen, compiled, stop, epoch, stops_at):
    if epoch is None:
        chosen, stop = (
            [name for name in chosen if "epoch" not in name],
            None if isinstance(stop, ms.loops.Period) else stop,
        )

    def run(step):
        seen = []

        def look(name):
            def looked(state, batch, elapsed, loop_state):
                seen.append((name, float(state), batch.tolist(), *numbers(elapsed), len(loop_state.history)))
                if elapsed.steps == stops_at:
                    loop_state.stop()

            return looked

        tasks = [(ms.every(1), step), *((SCHEDULES[name](), look(name)) for name in chosen)]
        output = ms.loop(jnp.float32(0), batches(20), tasks, stop=stop, epoch_duration=epoch)
        return seen, told(output.history), float(output.state), numbers(output.elapsed), output.reason

    assert run(compiled) == run(one_by_one(compiled))


def numbers(elapsed):
    before = elapsed.samples_before, elapsed.epochs_before, elapsed.starts_epoch, elapsed.final
    return elapsed.steps, elapsed.samples, elapsed.epochs, *before


def test_most_steps_are_done_several_at_a_time(bursts):
    ms.loop(jnp.float32(0), batches(200), {ms.every(1): step, ms.every(100): ms.loops.noop}, stop=180)
    assert sum(bursts) == 180 - 3  # all but the first, the hundredth and the last
    assert max(bursts) == 64


@pytest.mark.parametrize(
    "tasks",
    [
        {ms.every(1): one_by_one(step)},
        {ms.every(1): [step, lambda state: None]},
        {ms.every(1): step, ms.every(time=60): ms.loops.noop},
        {ms.every(1): jax.jit(lambda state, batch: ({"all": jnp.zeros(3)}, state))},
    ],
)
def test_what_has_to_be_looked_at_is_done_one_by_one(tasks, bursts):
    _, _, elapsed = ms.loop(jnp.float32(0), batches(20), tasks)
    assert elapsed.steps == 20 and bursts == []


def test_an_observer_that_may_stop_the_run_sees_every_step_alone(bursts):
    class Stop(ms.Observer):
        def observe(self, loop_state, start, stop):
            assert stop - start == 1
            if loop_state.elapsed.steps == 5:
                loop_state.stop()

    assert ms.loop(jnp.float32(0), batches(20), {ms.every(1): [step, Stop()]}).elapsed.steps == 5
    assert bursts == []


def test_an_observer_that_can_wait_sees_every_row_once(bursts):
    class Rows(ms.Observer):
        patience = 1.0
        rows: list[float]

        def __init__(self):
            self.rows = []

        def observe(self, loop_state, start, stop):
            assert loop_state.elapsed.steps == loop_state.history.elapsed().steps and stop == len(loop_state.history)
            self.rows += [row.metrics.loss for row in loop_state.history.rows(start, stop)]

    watch = Rows()
    history = ms.loop(jnp.float32(0), batches(100), {ms.every(1): [step, watch]}).history
    assert watch.rows == history.collect("loss") and sum(bursts) > 90


@pytest.mark.parametrize("failing", [2, 3, 40, 100])
@pytest.mark.parametrize("where", ["data", "step"])
def test_an_error_loses_nothing_that_came_before_it(failing, where):
    def data():
        for number, batch in enumerate(batches(200), start=1):
            if number == failing and where == "data":
                raise RuntimeError("no more")
            yield np.full((3, 1), 0.0, np.float32) if number == failing else batch

    @jax.jit
    def strict(state, batch):
        if batch.ndim == 2:
            raise RuntimeError("no more")
        return step(state, batch)

    outputs = []
    for task in (strict, one_by_one(strict)):
        with pytest.raises(RuntimeError, match="no more") as caught:
            ms.loop(jnp.float32(0), data(), {ms.every(1): task})
        output = caught.value.loop_output  # pyright: ignore
        notes = [note for note in caught.value.__notes__ if "Raised" in note]
        outputs.append((told(output.history), float(output.state), numbers(output.elapsed), notes))
        assert len(output.history) == failing - 1
        assert output.elapsed.steps == failing - (where == "data")
    names = ["strict", "<lambda>"]
    assert outputs[0][:3] == outputs[1][:3]
    for name, output in zip(names, outputs, strict=True):
        assert [(f" in {name}" in note) == (where == "step") for note in output[3]] == [True]


def test_an_interrupt_ends_a_burst_behind_its_step(bursts):
    def data():
        for number, batch in enumerate(batches(200)):
            if number == 30:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    output = ms.loop(jnp.float32(0), data(), {ms.every(1): step})
    assert output.interrupted and output.elapsed.steps == len(output.history) == 31
    assert bursts == [30]


def test_the_state_may_be_donated(bursts):
    donated = jax.jit(lambda state, batch: {"x": state["x"] + batch.sum()}, donate_argnums=0)
    state = ms.loop({"x": jnp.zeros(4)}, batches(100), {ms.every(1): donated}).state
    assert state["x"].tolist() == [2.0 * sum(range(100))] * 4 and sum(bursts) == 99


def test_entries_that_come_and_go_stay_in_their_rows():
    @jax.jit
    def sometimes(state, batch):
        logs = {"metrics": {"size": batch.sum()}}
        if batch.shape[0] == 3:
            logs["metrics"]["three"] = batch[2]
        return (logs if batch.shape[0] > 1 else {}), state + 1

    data = [np.full(1 + number % 3, number, np.float32) for number in range(50)]
    outputs = [ms.loop(jnp.float32(0), data, {ms.every(1): task}) for task in (sometimes, one_by_one(sometimes))]
    assert told(outputs[0].history) == told(outputs[1].history)
    assert outputs[0].history.collect("steps", "three")[0] == [number for number in range(1, 51) if number % 3 == 0]


def test_metric_objects_are_computed_at_their_step():
    @jax.jit
    def logged(state, batch):
        return {"mean": metrics.Average.from_model_output(values=batch)}, state + 1

    with jax.numpy_dtype_promotion("standard"):  # which clu needs
        outputs = [ms.loop(jnp.float32(0), batches(20), {ms.every(1): task}) for task in (logged, one_by_one(logged))]
    assert told(outputs[0].history) == told(outputs[1].history)


def test_the_time_of_every_step_is_kept(bursts):
    history = ms.loop(jnp.float32(0), batches(50), {ms.every(1): step}).history
    times = history.collect("time")
    assert times == sorted(times) and len(set(times)) > 40 and sum(bursts) == 49


def test_over_a_loader_a_burst_is_the_same_and_goes_on_from_anywhere(key, bursts):
    data = np.arange(44, dtype=np.float32).reshape(22, 2)
    loader = ms.DataLoader([ms.HostArraySource(data), ms.BatchTransform(4)])

    @jax.jit
    def masked(state, batch):
        values, mask = batch
        return {"sum": jnp.where(mask[:, None], values, 0).sum()}, state + mask.sum()

    whole = ms.loop(jnp.int32(0), loader, {ms.every(1): masked}, stop=15, key=key)
    assert whole.elapsed.samples == int(whole.state) == 2 * 22 + 3 * 4 and sum(bursts) == 13
    part = ms.loop(jnp.int32(0), loader, {ms.every(1): masked}, stop=8, key=key)
    rest = ms.loop(part.state, loader, {ms.every(1): masked}, stop=15, data_state=part.data_state, elapsed=part.elapsed)
    assert part.history.collect("sum") + rest.history.collect("sum") == whole.history.collect("sum")
