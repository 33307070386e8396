"""When callbacks are due."""

import datetime

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.loops._clock import Clock
from millstream.loops.schedules import Epochs


def moments(steps, *, samples=4, epoch=None, seconds=0.1):
    """The elapsed of the first steps of a run under a clock that is ours."""
    before, made = ms.loops.Elapsed(epochs=None if epoch is None else 0, epochs_before=None if epoch is None else 0), []
    for step in range(1, steps + 1):
        before = ms.loops.Elapsed(
            step,
            step * samples,
            None if epoch is None else step // epoch,
            step * seconds,
            1000.0,
            (step - 1) * samples,
            None if epoch is None else (step - 1) // epoch,
            (step - 1) * seconds,
        )
        made.append(before)
    return made


def due(schedule, steps, **run):
    return [elapsed.steps for elapsed in moments(steps, **run) if schedule(elapsed)]


def test_every_is_due_at_multiples():
    assert due(ms.every(3), 10) == [3, 6, 9]
    assert due(ms.every(steps=1), 3) == [1, 2, 3]
    assert due(ms.every(samples=10), 8) == [3, 5, 8]
    assert due(ms.every(epochs=2), 13, epoch=3) == [6, 12]
    assert due(ms.every(time=0.35), 12) == [4, 7, 11]
    assert due(ms.every(time=datetime.timedelta(seconds=0.5)), 11, seconds=0.25) == [2, 4, 6, 8, 10]


def test_a_step_longer_than_the_period_is_due_once():
    assert due(ms.every(samples=3), 3, samples=10) == [1, 2, 3]


def test_points_are_due_once():
    assert due(ms.at(5), 10) == [5]
    assert due(ms.at(steps=5) | ms.at(7), 10) == [5, 7]
    assert due(ms.at(samples=10), 10) == [3]
    assert due(ms.at(epochs=2), 10, epoch=3) == [6]
    assert due(ms.at(time=0.45), 10) == [5]
    assert due(ms.loops.once(epochs=1), 10, epoch=3) == [3]
    assert due(ms.at(date=datetime.datetime.fromtimestamp(1000.45)), 10) == [5]
    assert due(ms.at(steps=7, samples=8), 10) == [2]  # whatever comes first


def test_after_first_and_constants():
    assert due(ms.after(3), 5) == [3, 4, 5]
    assert due(ms.after(samples=10), 5) == [3, 4, 5]
    assert due(ms.loops.first(), 5) == [1]
    assert due(ms.loops.first(2), 5) == [1, 2]
    assert due(ms.loops.first(epochs=1), 7, epoch=3) == [1, 2, 3]
    assert due(ms.loops.always(), 3) == [1, 2, 3]
    assert due(ms.never(), 3) == []


def test_last_is_due_when_the_step_is_known_to_be_the_last():
    assert not ms.loops.last()(ms.loops.Elapsed(steps=3))
    assert ms.loops.last()(ms.loops.Elapsed(steps=3, final=True))


def test_what_follows_a_point_counts_from_it():
    assert due(ms.after(3).every(5), 20) == [8, 13, 18]
    assert due(ms.after(3) >> ms.every(5), 20) == [8, 13, 18]
    assert due(ms.after(3).then(ms.at(2)), 20) == [5]
    assert due(ms.after(time=0.3).every(time=0.5), 20) == [8, 13, 18]
    assert due(ms.after(samples=12).every(samples=20), 20) == [8, 13, 18]
    assert due(ms.after(epochs=1).every(epochs=2), 20, epoch=3) == [9, 15]


def test_piecewise_changes_at_its_points():
    schedule = ms.loops.piecewise(ms.every(2), {10: ms.every(5), ms.at(25): ms.never()})
    assert due(schedule, 40) == [2, 4, 6, 8, 15, 20]


def test_schedules_combine():
    assert due(ms.every(2) & ms.every(3), 12) == [6, 12]
    assert due(ms.every(4) | ms.every(6), 12) == [4, 6, 8, 12]
    assert due(~ms.every(2), 5) == [1, 3, 5]
    assert due(ms.every(2) & (lambda elapsed: elapsed.steps > 3), 6) == [4, 6]
    assert due(ms.every(2) | (lambda elapsed: elapsed.steps == 3), 4) == [2, 3, 4]


@given(st.data())
def test_combinations_are_those_of_logic(data):
    def schedules():
        leaf = st.builds(ms.every, st.integers(1, 7)) | st.builds(ms.after, st.integers(0, 9))
        return st.recursive(leaf, lambda inner: st.tuples(st.sampled_from("&|~"), inner, inner))

    tree = data.draw(schedules())

    def made(tree):
        if not isinstance(tree, tuple):
            return tree
        operator, left, right = tree
        if operator == "~":
            return ~made(left)
        return made(left) & made(right) if operator == "&" else made(left) | made(right)

    def truth(tree, elapsed):
        if not isinstance(tree, tuple):
            return tree(elapsed)
        operator, left, right = tree
        if operator == "~":
            return not truth(left, elapsed)
        left, right = truth(left, elapsed), truth(right, elapsed)
        return left and right if operator == "&" else left or right

    for elapsed in moments(20):
        assert made(tree)(elapsed) == truth(tree, elapsed)


@given(st.integers(1, 9), st.integers(0, 40), st.integers(1, 5))
def test_what_is_foretold_is_what_is_due(period, steps, epoch):
    for schedule in (ms.every(period), ms.every(epochs=period), ms.loops.always(), ms.never()):
        told = schedule.next_due(steps, Epochs(epoch))
        asked = [elapsed.steps for elapsed in moments(100, epoch=epoch) if elapsed.steps > steps and schedule(elapsed)]
        assert told == (asked[0] if asked else float("inf")) or (told is not None and told > 100)


def test_being_asked_changes_nothing():
    schedule, run = ms.after(3).every(samples=10) | ms.every(time=0.3), moments(20)
    assert [schedule(elapsed) for elapsed in run for _ in range(2)][::2] == [schedule(elapsed) for elapsed in run]


def test_equal_schedules_are_two_keys(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    keys = [
        ms.every(1),
        ms.every(1),
        ms.loops.always(),
        ms.loops.always(),
        ms.after(1),
        ms.after(1),
        ms.at(1),
        ms.at(1),
    ]
    assert len({key: None for key in keys}) == 8


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ms.every(), "exactly one of steps, samples, epochs and time. Got none"),
        (lambda: ms.every(5, samples=3), "exactly one"),
        (lambda: ms.every(0), "steps to be an int of at least 1. Got 0"),
        (lambda: ms.every(True), "steps to be an int"),
        (lambda: ms.every(2.5), "steps to be an int"),  # type: ignore[arg-type]
        (lambda: ms.every(time=0), "more than 0 seconds"),
        (lambda: ms.every(time="1h"), "time in seconds, or a datetime.timedelta"),  # type: ignore[arg-type]
        (lambda: ms.every(time=datetime.timedelta(seconds=-1)), "of at least 0. Got datetime.timedelta"),
        (lambda: ms.at(time=-1), "of at least 0. Got -1"),
        (lambda: ms.at(), "at needs a point"),
        (lambda: ms.at(date=3), "date to be a datetime.datetime"),  # type: ignore[arg-type]
        (lambda: ms.loops.piecewise(ms.every(2), {"soon": ms.every(3)}), "a point as steps or as at"),  # pyright: ignore[reportArgumentType]
        (lambda: ms.every(2) & 3, "needs a schedule such as every"),  # pyright: ignore[reportOperatorIssue]
        (lambda: not ms.every(2), "neither true nor false"),
        (lambda: ms.every(epochs=2)(ms.loops.Elapsed(steps=1)), "give the loop epoch_duration"),
        (lambda: ms.loops.piecewise(ms.every(3), 3), r"piecewise needs later as a dict .*Got 3 \(int\)"),  # type: ignore
        (
            lambda: ms.at(3).reached(1),  # type: ignore
            r"at\(steps=3\) needs an elapsed, as loops and ms\.loops\.elapse .*Got 1 \(int\)",
        ),
        (lambda: ms.at(3)("x"), r"at\(steps=3\) needs an elapsed"),  # type: ignore
        (lambda: ms.every(3)(6), r"every\(steps=3\) needs an elapsed"),  # type: ignore
        (lambda: ms.every(samples=3)(None), r"every\(samples=3\) needs an elapsed"),  # type: ignore
        (lambda: ms.after(3)(6), r"at\(steps=3\) needs an elapsed"),  # type: ignore
        (lambda: ms.loops.first(3)(6), r"first\(steps=3\) needs an elapsed"),  # type: ignore
        (lambda: ms.loops.last()(6), r"last\(\) needs an elapsed"),  # type: ignore
        (lambda: (ms.every(3) & ms.every(2))(6), r"every\(steps=3\) needs an elapsed"),  # type: ignore
        (lambda: ms.loops.piecewise(ms.every(3), {})(6), r"every\(steps=3\) needs an elapsed"),  # type: ignore
        (lambda: ms.loops.piecewise(ms.every(3), {5: ms.every(2)})(6), r"at\(steps=5\) needs an elapsed"),  # type: ignore
        (lambda: ms.loops.Elapsed(steps=3) >= "x", "'>=' not supported between instances of 'Elapsed' and 'str'"),
        (lambda: ms.loops.Elapsed(steps=3) < 2.5, "not supported between instances of 'Elapsed' and 'float'"),
        (lambda: ms.loops.Elapsed(steps=3) - 1, r"unsupported operand type\(s\) for -: 'Elapsed' and 'int'"),  # type: ignore
    ],
)
def test_mistakes_are_named(make, text):
    with pytest.raises((TypeError, ValueError), match=text):
        make()


def test_elapsed_is_compared_with_points():
    elapsed = ms.loops.Elapsed(steps=10, samples=40, time=3.0)
    assert elapsed >= 10 and not elapsed < 10 and elapsed < 11
    assert elapsed >= ms.at(samples=40) and elapsed < ms.at(samples=41)
    assert elapsed >= ms.at(steps=99, time=3)
    assert elapsed == elapsed.replace() and elapsed != elapsed.replace(steps=11)
    assert (elapsed - ms.loops.Elapsed(steps=4, samples=16, time=1.0)).time == 2.0


def test_elapsed_goes_through_compiled_functions_without_compiling_again(count_compilations):
    step = jax.jit(lambda elapsed: elapsed.steps + 1)
    step(ms.loops.Elapsed(steps=1, samples=4))
    with count_compilations() as count:
        assert int(step(ms.loops.Elapsed(steps=7, samples=2**31 - 1, time=1.5))) == 8
    assert count == [0]
    assert int(step(ms.loops.Elapsed(steps=7, samples=2**40))) == 8


def test_a_clock_goes_on_where_it_was_stopped():
    clock = Clock(None, ms.at(3))
    run = [clock.tick(4) for _ in range(7)]
    assert [elapsed.epochs for elapsed in run] == [0, 0, 1, 1, 1, 2, 2]
    assert [elapsed.steps for elapsed in run if elapsed.starts_epoch] == [1, 4, 7]
    for elapsed in run:
        resumed = Clock(elapsed, ms.at(3))
        following = [resumed.tick(4) for _ in range(5)]
        assert [moment.starts_epoch for moment in following] == [(elapsed.steps + i) % 3 == 0 for i in range(5)]
        assert following[0].time >= elapsed.time and following[0].samples == elapsed.samples + 4


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 6))
def test_skipping_steps_counts_like_taking_them(samples, epoch):
    one, many = Clock(None, ms.at(epoch)), Clock(None, ms.at(epoch))
    ahead = many.ahead(samples)
    taken = [one.tick(count) for count in samples]
    passed = many.skip(samples)
    last = many.now
    kept = [(now.steps, now.samples, now.epochs, now.samples_before) for now in passed.moments()]
    assert kept == [(now.steps, now.samples, now.epochs, now.samples_before) for now in taken]
    for left, right in zip(taken, ahead, strict=True):
        assert left.replace(time=0.0, time_before=0.0, date_start=0) == right.replace(
            time=0.0, time_before=0.0, date_start=0
        )
    assert last.replace(time=0.0, time_before=0.0, date_start=0) == taken[-1].replace(
        time=0.0, time_before=0.0, date_start=0
    )


def test_epochs_of_an_earlier_run_stay_where_nobody_counts_them():
    start = ms.loops.Elapsed(4, 16, epochs=2, epochs_before=2)
    one, many = Clock(start, None), Clock(start, None)
    taken = [one.tick(4).epochs for _ in range(3)]
    assert many.skip([4, 4, 4]).epochs == taken == [2, 2, 2] and many.now.epochs == many.now.epochs_before == 2
