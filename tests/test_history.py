"""A history keeps every value exactly, reads devices late, and becomes tables, files, states and images."""

import csv
import io
import itertools
import json
import math
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from millstream.callbacks import jsonl_logger
from millstream.files import plain
from millstream.loops import History, history, loop
from millstream.loops._clock import StepSpan
from millstream.loops.column import IN_FLIGHT, Column
from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import Logs, logs
from millstream.loops.schedules import always

step_fn = jax.jit(lambda x: {"metrics": {"loss": x / 2, "accuracy": 1 - x / 2}})


def elapsed_at(step, *, epoch=100, batch=8, date_start=1000.5):
    return Elapsed(step, batch * step, step // epoch, 0.25 * step, date_start, batch * (step - 1))


def committed(values, name="loss"):
    made = history()
    for step, value in enumerate(values, start=1):
        made.commit(elapsed_at(step), {name: value})
    return made


def same(left, right):
    """Equal, with equal types, and nan equal to nan."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    return type(left) is type(right) and (left == right or (left != left and right != right))


def assert_same_rows(left, right):
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        assert ours.keys() == theirs.keys()
        for (path, value), (other_path, other) in zip(sorted(ours.entries()), sorted(theirs.entries()), strict=True):
            assert path == other_path
            assert same(value, other), (path, value, other)
    assert list(left.weights()) == list(right.weights())
    assert [left.elapsed(row) for row in range(len(left))] == [right.elapsed(row) for row in range(len(right))]


def mixed_rows():
    for step in range(1, 151):
        row = logs().add_metric("loss", jnp.float32(1 / step)).add_stateful_metric("norm", jnp.bfloat16(step))
        if step % 50 == 0:
            row.add_metric("loss_test", float(step)).add_entry("texts", "note", f'step {step}, "fine"\n')
        if step % 7 == 0:
            row.add_metric("odd", [None, 2**70, math.nan, True, -0.0, np.int8(3), jnp.int32(5)][step // 7 % 7])
        if step > 140:
            row.add_output("logits", jnp.full((2, 3) if step < 149 else (1, 3), step, jnp.bfloat16))
        yield elapsed_at(step, date_start=1000.5 if step < 100 else 2000.25), row


MIXED_ROWS = list(mixed_rows())


def mixed_history():
    made = history()
    for row in MIXED_ROWS:
        made.commit(*row)
    return made


def test_values_of_a_device_are_kept_and_read_late():
    made, devices = history(), []
    for step in range(1, 201):
        outputs = step_fn(jnp.float32(step))
        devices.append(outputs["metrics"]["loss"])
        made.commit(elapsed_at(step), Logs(outputs))
    assert made.collect("loss") == [step / 2 for step in range(1, 201)]
    assert made.collect("steps", "accuracy") == (list(range(1, 201)), [1 - step / 2 for step in range(1, 201)])
    assert made.latest()["metrics"]["loss"] == 100.0


def test_the_newest_values_are_given_as_they_came():
    value = jnp.float32(2.5)
    assert committed([jnp.float32(0), value]).latest().metrics.loss is value


def test_committing_and_reading_compiles_nothing_and_puts_nothing_on_a_device(count_compilations):
    outputs = [Logs(step_fn(jnp.float32(step))) for step in range(100)]
    block = Logs(metrics={"loss": jnp.arange(3.0), "accuracy": jnp.arange(3.0)})
    made = history()
    with count_compilations() as count, jax.transfer_guard_host_to_device("disallow"):
        for step, each in enumerate(outputs, start=1):
            made.commit(elapsed_at(step), each)
        made.commit_block(StepSpan(range(101, 104), [801, 802, 803], None, [30.0] * 3, 1000.5, 800), block)
        made.latest()
        assert made.collect("loss")[-3:] == [0.0, 1.0, 2.0]
        made.to_state()
    assert count == [0]


@pytest.mark.parametrize(
    "values",
    [
        [jnp.float32(1.5), jnp.float32(math.nan), jnp.float32(-math.inf)],
        [jnp.bfloat16(1.5), jnp.bfloat16(3)],
        [jnp.int32(7), jnp.int32(-7)],
        [jnp.array(True), jnp.array(False)],
        [jnp.float8_e5m2(2), jnp.float8_e5m2(4)],
        [np.float64(0.1), np.float64(0.2)],
        [np.array(3, np.int16), np.array(4, np.int16)],
        [0.1, 0.2],
        [1, 2**62],
        [-1, 2**63],
        [2**70, 3],
        ["left", "a much longer word"],
        [np.str_("left"), np.str_("a much longer word")],
        [np.bytes_(b"left"), np.bytes_(b"right")],
        [np.datetime64("2026-01-01"), np.datetime64("2026-01-02")],
        [None, 1.0, None],
        [1 + 2j, 3j],
        [1, 2.5, True, jnp.float32(4), "five", None],
    ],
    ids=lambda values: "-".join(dict.fromkeys(type(value).__name__ for value in values)),
)
def test_values_of_any_kind_come_back_as_python_has_them(values):
    expected = [value.item() if hasattr(value, "item") else value for value in values]
    for read_in_between in (False, True):
        made = history()
        for step, value in enumerate(values, start=1):
            made.commit(elapsed_at(step), {"x": value})
            if read_in_between:
                made.collect("x")
        assert all(same(a, b) for a, b in zip(made.collect("x"), expected, strict=True))
        again = History.from_state(plain.decode(plain.encode(made.to_state())))
        assert all(same(a, b) for a, b in zip(again.collect("x"), expected, strict=True))


def test_a_value_that_changes_its_dtype_or_shape_loses_none():
    values = [jnp.float32(1), jnp.float32(2), jnp.int32(3), jnp.ones(2), jnp.ones((2, 2)), jnp.float32(4)]
    found = committed(values).collect("loss")
    assert found[:3] == [1.0, 2.0, 3] and type(found[2]) is int and found[5] == 4.0
    assert found[3].shape == (2,) and found[4].shape == (2, 2)


@given(st.data())
def test_columns_that_are_read_together_keep_their_own_values_and_dtypes(data):
    """Floats, whole numbers and numbers of the host, each logged at some of the steps, with a change of dtype."""
    kinds = [np.float32, np.int32, np.bool_, float]
    columns = {f"m{i}": data.draw(st.sampled_from(kinds)) for i in range(data.draw(st.integers(1, 6)))}
    rarely = data.draw(st.sets(st.sampled_from(sorted(columns))))
    changed = data.draw(st.integers(0, 150))
    made, expected = history(), {name: [] for name in columns}
    for step in range(1, 150):
        row = {}
        for number, (name, kind) in enumerate(columns.items()):
            if name not in rarely or step % 3 == 0:
                value = (np.int32 if step == changed else kind)(step * (number + 1) % 7)
                expected[name].append(value if kind is float and step != changed else value.item())
                row[name] = value if type(value) is float else jax.device_put(value)
        if row:
            made.commit(elapsed_at(step), row)
    for name, values in expected.items():
        found = made.collect(name) if values else []
        assert found == values and [*map(type, found)] == [*map(type, values)]


def test_a_shape_of_one_is_not_taken_for_a_number():
    found = committed([jnp.float32(1), jnp.ones(1), jnp.float32(1)]).collect("loss")
    assert found[1].shape == (1,)


def test_values_on_several_devices_and_replicated_ones_are_read():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "d")
    whole = jax.device_put(jnp.float32(3), NamedSharding(mesh, P()))
    split = jax.device_put(jnp.arange(float(len(jax.devices()))), NamedSharding(mesh, P("d")))
    made = history()
    made.commit(elapsed_at(1), logs().add_metric("loss", whole).add_output("parts", split))
    assert made.collect("loss") == [3.0]
    np.testing.assert_array_equal(made.collect("parts")[0], np.arange(len(jax.devices())))


def test_an_array_of_numpy_is_kept_as_it_was_when_it_was_logged():
    buffer, number, made = np.zeros(3), np.array(0.0), history()
    for step in range(1, 4):
        buffer[:], number[...] = step, step
        made.commit(elapsed_at(step), logs().add_metric("number", number).add_output("buffer", buffer))
    assert made.collect("number") == [1.0, 2.0, 3.0]
    assert [value[0] for value in made.collect("buffer")] == [1.0, 2.0, 3.0]


def test_an_array_in_a_file_is_kept_as_it_was_when_it_was_logged(tmp_path):
    mapped, made = np.memmap(tmp_path / "array", np.float32, "w+", shape=(2,)), history()
    for step in range(1, 3):
        mapped[:] = step
        made.commit(elapsed_at(step), logs().add_output("mapped", mapped))
    assert [value[0] for value in made.collect("mapped")] == [1.0, 2.0]


def test_logs_that_are_used_again_do_not_change_what_was_committed():
    made, reused = history(), logs()
    for step in range(1, 4):
        made.commit(elapsed_at(step), reused.add_metric("loss", float(step)))
    assert made.collect("loss") == [1.0, 2.0, 3.0]


def test_a_donated_value_is_named_and_others_can_still_be_read():
    made, gone = history(), jnp.float32(1)
    made.commit(elapsed_at(1), {"loss": gone, "accuracy": jnp.float32(0.5)})
    gone.delete()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"value metrics\.loss was donated .* jnp\.copy"):
            made.collect("loss")
    assert made.collect("accuracy") == [0.5]


def test_values_of_steps_under_way_can_be_left_out():
    column = Column("loss", plain=True)
    for row in range(5):
        column.append(row, jnp.float32(row))
    assert column.since(1, settled=3) == [1.0, 2.0]
    assert len(column.since(0)) == 3 + IN_FLIGHT


def test_a_history_says_which_rows_are_of_steps_that_are_over():
    made = history()
    assert made.ready_rows(0) == 0
    for step in (1, 2, 3, 10, 20):
        made.commit(elapsed_at(step), {"loss": 1.0})
    assert [made.ready_rows(step) for step in (20, 21, 22)] == [4, 4, 5]
    assert made.ready_rows(20, together=2) == 4  # two programs of two rows each may be in flight
    assert made.ready_rows(20, together=5) == 4 and made.ready_rows(20, together=9) == 2
    assert made.ready_rows(1) == 3  # a new run with an old history: at most two rows are in flight


def test_large_values_do_not_wait_on_the_device():
    made, arrays = history(), [jnp.full(4, float(i)) for i in range(8)]
    for step, array in enumerate(arrays, start=1):
        made.commit(elapsed_at(step), logs().add_output("y", array))
    for array in arrays[:-IN_FLIGHT]:
        array.delete()
    assert [value[0] for value in made.collect("y")] == list(range(8))


def test_more_logs_of_the_same_step_go_into_its_row_and_newer_values_win():
    made = committed([1.0, 2.0])
    made.commit(elapsed_at(2), {"loss": jnp.float32(3), "loss_test": 9.0})
    made.collect("loss")
    made.commit(elapsed_at(2), {"loss": 4.0})
    made.commit(elapsed_at(3), {"loss": 5.0})
    assert len(made) == 3
    assert made.collect("loss") == [1.0, 4.0, 5.0]
    assert made.collect("steps", "loss", "loss_test") == ([2], [4.0], [9.0])


def test_a_block_equals_its_rows_one_by_one():
    one_by_one, blocks = history(), history()
    for first in (1, 4, 7):
        steps = range(first, first + 3)
        values = jnp.arange(first, first + 5, dtype=jnp.float32)  # two more than there are steps
        for i, step in enumerate(steps):
            now = Elapsed(step, 10 * step, step // 4, float(first), 5.0, 10 * (step - 1))
            one_by_one.commit(now, logs().add_metric("loss", values[i]).add_output("y", jnp.stack([values[i]] * 2)))
        epochs, samples = [step // 4 for step in steps], [10 * step for step in steps]
        blocks.commit_block(
            StepSpan(steps, samples, epochs, [float(first)] * len(steps), 5.0, 10 * (first - 1)),
            logs().add_metric("loss", values).add_output("y", jnp.stack([values] * 2, axis=1)),
        )
        assert blocks.latest().metrics.loss == values[2]
        for made in (one_by_one, blocks):
            made.commit(made.elapsed().replace(final=True), {"loss_test": float(first)})
    assert_same_rows(one_by_one, blocks)
    assert blocks.collect("steps", "loss_test") == ([3, 6, 9], [1.0, 4.0, 7.0])


def test_entries_of_different_rates_are_collected_together():
    made = history()
    for step in range(1, 7):
        made.commit(elapsed_at(step), {"loss": step} | ({"loss_test": -step} if step % 3 == 0 else {}))
    made.commit(elapsed_at(7), {"other": 0})
    assert made.collect("steps", "loss", "loss_test") == ([3, 6], [3, 6], [-3, -6])
    assert made.collect("loss", "other") == ([], [])
    steps, loss, test, other = made.collect("steps", "loss", "loss_test", "other", missing=-1)
    assert steps == [1, 2, 3, 4, 5, 6, 7] and loss == [1, 2, 3, 4, 5, 6, -1]
    assert test == [-1, -1, -3, -1, -1, -6, -1] and other == [-1] * 6 + [0]
    assert made.collect("time") == [0.25 * step for step in range(1, 8)]
    assert made.collect("elapsed.samples", "epochs") == ([8 * step for step in range(1, 8)], [0] * 7)


def test_a_name_in_several_collections_is_refused():
    made = history()
    made.commit(elapsed_at(1), {"metrics": {"loss": 1.0}, "stateful_metrics": {"loss": 2.0}})
    assert made.collect("metrics.loss") == [1.0]
    with pytest.raises(ValueError, match=r"metrics\.loss, stateful_metrics\.loss"):
        made.collect("loss")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("los", r" Did you mean 'loss'\?"),
        ("metric.loss", r" Did you mean 'metrics\.loss'\?"),
        ("losses.loss", r" Did you mean 'metrics\.loss'\?"),
        ("step", r" Did you mean 'steps'\?"),
        ("zzz", ""),
    ],
)
def test_a_name_that_was_never_logged_is_an_error_that_lists_what_was(name, hint):
    made = committed([1.0, 2.0])
    for call, word in ((made.collect, "collect"), (made.mean, "mean")):
        if name == "step" and word == "mean":
            continue
        with pytest.raises(
            ValueError, match=rf"^History\.{word}: '{name}' was never logged\.{hint} Logged: metrics\.loss\."
        ):
            call(name)
    with pytest.raises(ValueError, match=f"'{name}' was never logged"):
        made.collect("steps", name)


def test_a_name_that_may_be_logged_later_has_a_value_to_stand_for_it():
    for made in (history(), committed([1.0, 2.0])):
        steps = list(range(1, len(made) + 1))
        assert made.collect("loss_test", missing=math.nan) == []
        assert made.collect("steps", "loss_test", missing=0) == ([], [])
        assert made.mean("loss_test", missing=-1.0) == -1.0 and math.isnan(made.mean("loss_test", missing=math.nan))
        assert made.collect("steps") == steps
    assert made.collect("loss", "loss_test", missing=0) == ([1.0, 2.0], [0, 0])


def test_of_very_many_names_an_error_lists_some():
    made = history()
    made.commit(elapsed_at(1), {f"metric_{number}": 1.0 for number in range(1000)})
    with pytest.raises(ValueError, match=r"metrics\.metric_0, .* and 980 more\.") as caught:
        made.collect("loss")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", [1.0, None, ["loss", "accuracy"], b"loss"], ids=str)
def test_what_is_not_a_name_is_refused(name):
    made = committed([1.0])
    with pytest.raises(TypeError, match=r'History\.collect needs names as "name" or "collection.name"\. Got '):
        made.collect(name)
    with pytest.raises(TypeError, match=r"History\.mean needs names as"):
        made.mean(name)
    with pytest.raises(TypeError, match=r"History\.plot needs names to be a list of names\. Got "):
        made.plot(names=[name])


def test_names_of_what_is_logged_are_texts():
    with pytest.raises(TypeError, match=r"Names of what is logged are strings\. Got 1 \(int\) in 'metrics'"):
        history().commit(elapsed_at(1), {1: 0.5})  # pyright: ignore[reportArgumentType]


def test_a_row_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"History\.elapsed needs a row\. The history is empty"):
        history().elapsed()
    with pytest.raises(ValueError, match=r"History\.elapsed needs a row from -2 to 1\. Got 2\."):
        committed([1.0, 2.0]).elapsed(2)
    with pytest.raises(TypeError, match=r"History\.elapsed needs a row as an int\. Got 'x' \(str\)"):
        committed([1.0]).elapsed("x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(IndexError, match=r"History has 2 rows\. Got index 2\."):
        committed([1.0, 2.0])[2]
    with pytest.raises(
        TypeError, match=r"History is indexed by row numbers and slices\. Got 'loss' \(str\).*collect\('loss'\)"
    ):
        committed([1.0])["loss"]  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.parametrize("path", [5, None, b"run", 1.5], ids=str)
def test_what_is_not_a_path_is_refused(path):
    made = committed([1.0])
    for call, word in ((made.to_csv, "to_csv"), (made.to_jsonl, "to_jsonl"), (History.from_jsonl, "from_jsonl")):
        with pytest.raises(TypeError, match=rf"History\.{word} needs (the path of a file|a path)\. Got "):
            call(path)  # pyright: ignore[reportArgumentType]
    if path is not None:
        with pytest.raises(TypeError, match=r"History\.plot needs the path of a file\. Got "):
            made.plot(path)  # pyright: ignore[reportArgumentType]


def test_files_of_a_history_that_cannot_be_are_refused(tmp_path):
    made = committed([1.0])
    for call, word in ((made.to_csv, "to_csv"), (made.to_jsonl, "to_jsonl"), (made.plot, "plot")):
        with pytest.raises(IsADirectoryError, match=rf"History\.{word} needs the path of a file\. .* is a folder\."):
            call(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"History\.from_jsonl: .*none does not exist"):
        History.from_jsonl(tmp_path / "none")
    with pytest.raises(ValueError, match=r"History\.from_jsonl reads from this machine alone.*s3://x") as caught:
        History.from_jsonl("s3://x?SECRET")
    assert "SECRET" not in str(caught.value)


def test_a_title_or_a_scale_of_a_plot_that_is_none_is_refused():
    with pytest.raises(TypeError, match=r"History\.plot needs title to be a str\. Got 3"):
        committed([1.0]).plot(title=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"History\.plot needs log to be a bool\. Got 3"):
        committed([1.0]).plot(log=3)  # pyright: ignore[reportArgumentType]


def test_names_of_logs_are_text():
    for add in (lambda: logs().add_entry(3, "x", 1), lambda: logs().add_metrics({3: 1})):  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match=r"Logs needs names that are text\. Got 3 \(int\)"):
            add()
    with pytest.raises(KeyError, match=r"Logs have no entry array"):
        logs().add_metric("x", 1).entry_path(np.zeros(0))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"Logs\.add_losses needs add_metrics to be a bool\. Got 3"):
        logs().add_losses({"x": 1}, add_metrics=3)  # pyright: ignore[reportArgumentType]


def test_rows_can_be_indexed_sliced_and_iterated():
    made = committed([1.0, 2.0, 3.0, 4.0])
    assert made[0].metrics.loss == 1.0 and made[-1].metrics.loss == 4.0 and made[1].elapsed.steps == 2
    assert [row.metrics.loss for row in made[1:3]] == [2.0, 3.0]
    assert [row.metrics.loss for row in made[::-2]] == [4.0, 2.0]
    assert made[2:2] == [] and [row.elapsed.time for row in made] == [0.25, 0.5, 0.75, 1.0]
    assert repr(made) == "History(4 rows: metrics.loss)"
    assert repr(history()) == "History(0 rows: nothing logged)"
    for wrong in (4, -5):
        with pytest.raises(IndexError):
            made[wrong]


def test_means_are_weighted_by_samples():
    made = history()
    for step, (samples, loss) in enumerate([(4, 1.0), (4, 2.0), (1, 6.0)], start=1):
        before = made.elapsed().samples if len(made) else 0
        made.commit(Elapsed(step, before + samples, samples_before=before), {"loss": jnp.float32(loss)})
    assert made.mean("loss") == pytest.approx(2.0)
    assert made.mean("loss", start=1) == pytest.approx(14 / 5)
    assert math.isnan(made.mean("loss", start=3))


def test_rows_without_samples_do_not_count_in_a_mean():
    made = history()
    made.commit(Elapsed(1, 0), {"loss": math.nan})
    made.commit(Elapsed(2, 4), {"loss": 2.0})
    assert made.mean("loss") == 2.0


def test_a_resumed_run_keeps_the_dates_of_its_first_part():
    made = mixed_history()
    dates = made.collect("date")
    assert dates[0] == 1000.75 and dates[98] == 1000.5 + 0.25 * 99 and dates[99] == 2000.25 + 25.0
    assert made.elapsed(0).date_start == 1000.5 and made.elapsed(-1).date_start == 2000.25


def test_a_row_with_two_metrics_takes_at_most_48_bytes():
    made, row = history(), Logs(metrics={"loss": jnp.float32(1), "accuracy": jnp.float32(2)})
    for step in range(1, 20_001):
        made.commit(elapsed_at(step), row)
    state = made.to_state()
    arrays = [
        *(a for a in state["moments"].values() if isinstance(a, np.ndarray)),
        *(r["array"] for c in state["columns"] for r in c["values"]),
    ]
    assert sum(array.nbytes for array in arrays) <= 40 * 20_000  # neither rows nor steps, which are just ranges
    assert {column["rows"] for column in state["columns"]} == {(0, 20_000)}
    assert all(type(column.rows) is range for column in made.columns().values())


# Tables


def test_a_table_has_a_value_or_none_for_every_row():
    table = mixed_history().to_dict()
    assert list(table)[:5] == ["steps", "samples", "epochs", "time", "date"]
    assert {len(column) for column in table.values()} == {150}
    assert table["loss_test"][48:51] == [None, 50.0, None] and table["epochs"][98:100] == [0, 1]
    assert "logits" not in table and table["note"][49] == 'step 50, "fine"\n'


def test_names_in_a_table_are_those_that_collect_understands():
    made = history()
    made.commit(elapsed_at(1), {"metrics": {"a": 1, "b": 2, "steps": 3}, "losses": {"a": 1}, "mine": {"b": 4}})
    table = made.to_dict()
    assert list(table)[5:] == ["a", "metrics.b", "metrics.steps", "losses.a", "mine.b"]
    assert all(made.collect(name) == table[name] for name in list(table)[5:])
    assert table["steps"] == [1]


def test_a_dataframe_has_the_columns_of_the_table():
    frame = mixed_history().to_pandas()
    assert frame.shape == (150, 10) and frame["loss"].dtype == np.float64
    assert frame["loss"].tolist()[:2] == [1.0, 0.5]
    assert frame["loss_test"].dropna().tolist() == [50.0, 100.0, 150.0]


def test_a_csv_file_holds_the_table_exactly(tmp_path):
    made = mixed_history()
    path = made.to_csv(tmp_path / "new" / "history.csv")
    header, *rows = csv.reader(io.StringIO(path.read_text(), newline=""))
    table = made.to_dict()
    assert header == list(table) and len(rows) == 150
    assert [float(row[header.index("loss")]) for row in rows] == table["loss"]
    assert rows[49][header.index("note")] == 'step 50, "fine"\n' and rows[0][header.index("note")] == ""
    assert [file.name for file in path.parent.iterdir()] == ["history.csv"]


def test_lines_of_json_lead_back_to_the_same_history(tmp_path):
    made = mixed_history()
    again = History.from_jsonl(made.to_jsonl(tmp_path / "history.jsonl"))
    without_outputs = History.from_state(made.to_state(outputs=False))
    assert_same_rows(again, without_outputs)
    again.commit(elapsed_at(151), {"loss": 1.0})
    assert again.collect("steps")[-2:] == [150, 151]


def test_collections_may_be_called_like_the_units_of_a_row(tmp_path):
    made = history()
    made.commit(elapsed_at(1), logs().add_entry("time", "data", 1.0).add_entry("samples", "seen", 3))
    assert_same_rows(History.from_jsonl(made.to_jsonl(tmp_path / "h")), made)


def test_a_line_of_json_is_a_row(tmp_path):
    line = json.loads(committed([0.5]).to_jsonl(tmp_path / "h").read_text())
    assert line["metrics"] == {"loss": 0.5} and line["elapsed"]["steps"] == 1


def test_plain_lines_are_understood_and_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"steps": 1, "samples": 4, "loss": 0.5}\n{"steps": 2, "samples": 6, "loss": NaN}\n{"steps": 3, "lo'
    )
    made = History.from_jsonl(path)
    assert made.collect("steps") == [1, 2] and made.collect("loss")[0] == 0.5 and math.isnan(made.collect("loss")[1])
    assert list(made.weights()) == [4, 2]


def test_what_a_logger_has_written_is_read(tmp_path):
    path, values = tmp_path / "log.jsonl", [0.5, math.nan, -math.inf]
    tasks = [
        (always(), lambda state: (logs().add_metric("loss", values[state]), state + 1)),
        (always(), jsonl_logger(path)),
    ]
    _, made, _ = loop(0, range(3), tasks)
    again = History.from_jsonl(path)
    assert again.collect("steps", "samples", "epochs", "time") == made.collect("steps", "samples", "epochs", "time")
    assert all(same(a, b) for a, b in zip(again.collect("loss"), values, strict=True))


@pytest.mark.parametrize("line", ["{", "3", '{"loss": 1}', '{"elapsed": 1}'])
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    path = tmp_path / "log.jsonl"
    path.write_text('{"steps": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"History\.from_jsonl needs .* Line 2 of .*log\.jsonl is"):
        History.from_jsonl(path)


def test_what_is_no_number_or_text_does_not_go_into_json_or_a_state(tmp_path):
    made = committed([object()])
    with pytest.raises(TypeError, match=r"History\.to_jsonl writes numbers and text\. Step 1"):
        made.to_jsonl(tmp_path / "h")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match=r"metrics\.loss was logged as <object"):
        made.to_state()


# States


def test_a_state_leads_back_to_the_same_history_through_plain_bytes():
    made = mixed_history()
    again = History.from_state(plain.decode(plain.encode(made.to_state())))
    assert_same_rows(again, made)
    assert again.names() == made.names()
    for history_ in (made, again):
        history_.commit(elapsed_at(150), {"loss": 7.0})  # still the newest step
        history_.commit(elapsed_at(151), {"loss": 8.0})
    assert_same_rows(again, made)
    assert same(
        again.to_state()["columns"][1]["values"][0]["array"], made.to_state()["columns"][1]["values"][0]["array"]
    )


@given(st.lists(st.integers(0, len(MIXED_ROWS)), max_size=5))
def test_parts_join_to_the_whole(cuts):
    made = mixed_history()
    cuts = [0, *sorted(cuts), len(made)]
    parts = [made.to_state(start, stop) for start, stop in itertools.pairwise(cuts)]
    assert_same_rows(History.from_state(*parts), made)


def test_a_part_that_does_not_follow_the_others_is_refused():
    made = committed([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"needs row 0 next\. Got a part that starts with row 2"):
        History.from_state(made.to_state(2))
    with pytest.raises(ValueError, match=r"needs row 2 next\. Got a part that starts with row 1"):
        History.from_state(made.to_state(0, 2), made.to_state(1))


def test_a_state_with_other_rows_than_it_says_is_refused():
    state = committed([1.0, 2.0, 3.0]).to_state()
    for rows, words in [
        ((0, 2), "needs 3 rows of metrics.loss"),
        ((1, 4), "other rows"),
        (np.array([0, 2, 1]), "other rows"),
    ]:
        (column,) = state["columns"]
        with pytest.raises(ValueError, match=words):
            History.from_state({**state, "columns": [{**column, "rows": rows}]})
    with pytest.raises(ValueError, match=r"needs 3 steps\. Got 1000000000000000"):
        History.from_state({**state, "moments": {**state["moments"], "steps": (0, 10**15)}})


def test_an_empty_history_has_tables_and_a_state(tmp_path):
    empty = History.from_state(history().to_state())
    assert len(empty) == 0 and empty.collect("steps") == []
    with pytest.raises(ValueError, match=r"'loss' was never logged\. Nothing has been logged yet"):
        empty.collect("loss")
    assert empty.to_dict() == {"steps": [], "samples": [], "epochs": [], "time": [], "date": []}
    assert len(empty.to_pandas()) == 0 and len(History.from_jsonl(empty.to_jsonl(tmp_path / "h"))) == 0
    assert len(History.from_state()) == 0


def test_a_loop_goes_on_with_a_history_that_was_saved():
    def count(state):
        return logs().add_metric("state", float(state)), state + 1

    state, first, elapsed = loop(0, range(3), [(lambda _: True, count)])
    _, whole, _ = loop(
        state, range(2), [(lambda _: True, count)], history=History.from_state(first.to_state()), elapsed=elapsed
    )
    assert whole.collect("steps", "state") == ([1, 2, 3, 4, 5], [0.0, 1.0, 2.0, 3.0, 4.0])


# Images


def curves(count, *, every=10, nan=None):
    made = history()
    for step in range(1, count + 1):
        row = {"loss": 4 * math.exp(-6 * step / count) if step != nan else math.nan, "rate": 0.1}
        if step % every == 0:
            row |= {"loss_test": 0.2 + abs(step - 0.7 * count) / count, "accuracy": step / count}
        made.commit(elapsed_at(step, epoch=max(count // 5, 1)), row)
    return made


def panels_of(figure):
    return {axis.get_title("left"): axis for axis in figure.axes if axis.get_title("left")}


def texts_of(axis):
    return " ".join(text.get_text() for text in axis.texts)


def test_a_picture_has_a_panel_per_metric_with_training_and_evaluation_together():
    panels = panels_of(curves(200).plot(title="digits"))
    assert list(panels) == ["loss", "rate", "accuracy"]
    loss = panels["loss"]
    assert "loss_test" in texts_of(loss) and "loss " in texts_of(loss)
    assert (
        loss.get_title("right") == "best 0.2 at step 140"
        and panels["accuracy"].get_title("right") == "best 1 at step 200"
    )
    assert loss.get_yscale() == "log" and panels["accuracy"].get_yscale() == "linear"
    assert len(loss.lines) == 4  # raw and smoothed, evaluation, and the best point
    assert [text.get_text() for text in loss.child_axes[0].get_xticklabels()] == ["epoch 1", "2", "3", "4", "5"]


def test_a_picture_is_a_png_of_a_sensible_size(tmp_path):
    path = curves(20).plot(tmp_path / "new" / "history.png", dpi=50)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (810, 175) and 3_000 < len(data) < 100_000
    assert [file.name for file in path.parent.iterdir()] == ["history.png"]


def test_a_notebook_shows_a_picture():
    from matplotlib.figure import Figure

    figure = curves(5).plot()
    assert figure._repr_png_()[:8] == b"\x89PNG\r\n\x1a\n" and isinstance(figure, Figure)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_picture_leaves_the_rest_of_matplotlib_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    curves(5).plot()
    assert dict(matplotlib.rcParams) == before


def test_gaps_are_marked_and_said():
    loss = panels_of(curves(100, nan=37).plot())["loss"]
    assert "loss: 1 not finite, first at step 37" in texts_of(loss)
    assert any(line.get_marker() == "x" and np.array_equal(line.get_xdata(), [37]) for line in loss.lines)


def test_a_picture_of_what_was_asked_for():
    made = curves(100)
    assert list(panels_of(made.plot(names=["accuracy", "metrics.loss_test"]))) == ["accuracy", "loss_test"]
    assert panels_of(made.plot(log=False))["loss"].get_yscale() == "linear"
    assert len(panels_of(made.plot(names=["rate"], smooth=0))["rate"].lines) == 1
    with pytest.raises(
        ValueError,
        match=r"History\.plot: 'lost' was never logged\. Did you mean 'loss'\? Logged: metrics\.loss, metrics\.rate",
    ):
        made.plot(names=["lost"])
    with pytest.raises(TypeError, match=r"write \['loss'\]"):
        made.plot(names="loss")
    with pytest.raises(ValueError, match="needs at least one name"):
        made.plot(names=[])
    with pytest.raises(ValueError, match="smooth as a share"):
        made.plot(smooth=5)


def test_long_curves_are_thinned_without_losing_their_extremes():
    made, values = history(), np.random.default_rng(0).standard_normal(20_000)
    values[12_345] = 50
    steps = range(1, 20_001)
    made.commit_block(StepSpan(steps, list(steps), None, [1.0] * 20_000, 0.0, 0), logs().add_metric("noise", values))
    raw = np.asarray(panels_of(made.plot())["noise"].lines[0].get_ydata())
    assert len(raw) < 5_000 and raw.max() == 50 and raw.min() == values.min()


def test_a_single_row_can_be_drawn_and_nothing_cannot():
    axis = panels_of(curves(1, every=1).plot())["loss"]
    assert len(axis.lines) == 2 and "loss_test" in texts_of(axis)
    for empty in (history(), committed(["text"]), committed([jnp.ones(3)])):
        with pytest.raises(ValueError, match=r"History\.plot needs numbers"):
            empty.plot()


def test_a_curve_without_any_finite_value_is_drawn_as_its_gaps():
    axis = panels_of(committed([math.nan, math.inf]).plot())["loss"]
    assert "2 not finite, first at step 1" in texts_of(axis)


def test_a_mean_may_count_from_the_end():
    kept = history()
    for step in range(1, 6):
        kept.commit(Elapsed(steps=step, samples=step, samples_before=step - 1), {"loss": float(step)})
    assert [kept.mean("loss", start) for start in (0, 3, -2, -99)] == [3.0, 4.5, 4.5, 3.0]
