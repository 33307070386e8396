"""Watchers in a loop that somebody has written, where nobody tells them when a run begins and ends."""

import math

import numpy as np
import pytest

import millstream as ms
from millstream.callbacks import terminate_on_nan

pytestmark = pytest.mark.optimized

NAN = math.nan


def test_early_stopping_begins_anew_with_a_new_run():
    stop_early = ms.callbacks.early_stopping("loss", 2, restore_best_weights=True)
    for first in (1.0, 5.0):  # what was good in the first run is not in the way of the second
        found = [stop_early(ms.loops.Elapsed(steps=step), step, {"loss": first}) for step in (1, 2, 3)]
        assert found == [(False, 1), (False, 2), (True, 1)]
        assert stop_early.best_value == first


def test_a_step_that_is_shown_twice_is_no_new_run():
    stop_early = ms.callbacks.early_stopping("loss", 1)
    asked = [stop_early(ms.loops.Elapsed(steps=step), None, {"loss": 1.0})[0] for step in (1, 1, 2)]
    assert asked == [False, False, True]


def test_throughput_does_not_measure_from_one_run_to_the_next():
    meter, found = ms.callbacks.throughput(), []
    for _ in range(2):
        found += [meter(elapsed) for elapsed, _ in ms.loops.elapse([np.ones(4)] * 3)]
    assert [logs is None for logs in found] == [True, False, False] * 2
    assert all(logs.throughput.samples_per_second > 0 for logs in found if logs is not None)


@pytest.mark.parametrize("action", ["raise", "stop"])
def test_the_last_steps_are_looked_at_when_one_says_that_they_are(action):
    watch = terminate_on_nan(action=action)
    asked = [watch(ms.loops.Elapsed(steps=step), {"loss": NAN if step == 3 else 1.0}) for step in range(1, 6)]
    assert asked == [False] * 5
    if action == "raise":
        with pytest.raises(FloatingPointError, match=r"found metrics.loss to be nan at step 3\."):
            watch.finish()
    else:
        watch.finish()
        assert watch(ms.loops.Elapsed(steps=6))


def test_what_is_watched_for_nan_may_come_as_any_several_names():
    for monitor in (["loss"], {"loss"}, (name for name in ["loss"])):
        watch = terminate_on_nan(monitor)
        watch(ms.loops.Elapsed(steps=1), {"loss": NAN, "other": 1.0})
        with pytest.raises(FloatingPointError, match=r"found metrics\.loss to be nan at step 1"):
            watch.finish()
    with pytest.raises(ValueError, match=r"terminate_on_nan needs a name in monitor, or None for all .*Got \[\]"):
        terminate_on_nan([])
    with pytest.raises(TypeError, match=r'terminate_on_nan needs monitor as "name" or "collection.name". Got 3'):
        terminate_on_nan(3)  # pyright: ignore[reportArgumentType]
