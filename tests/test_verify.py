"""Verifying a loader: sound pipelines pass, and every promise that is broken on purpose is named."""

import _thread
import collections
import dataclasses
import io
import itertools
import os
import random
import subprocess
import sys
import textwrap
import threading
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pipelines
import pytest
from pipelines import BATCH, PIPELINES, SAMPLES, Echo, sample, source
from test_bad_input import refuses

import millstream as ms
from millstream.inspect._compare import compare
from millstream.plan.plan import Plan

pytestmark = pytest.mark.optimized

cloudpickle.register_pickle_by_value(pipelines)  # so that workers do not import it, and JAX with it
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = {"x": np.arange(2 * SAMPLES, dtype=np.float32).reshape(SAMPLES, 2)}
SPEC = {"x": jax.ShapeDtypeStruct((), np.float32)}


def verified(stages, *, executors=(), **options):
    """What is found, without worker processes, which take a while to start."""
    loader = ms.DataLoader(stages, **options)
    return loader.verify(executors=executors, hosts=(1, 2), progress=False, raises=False)


def row_of(verification, check) -> Any:
    (row,) = (row for row in verification.rows if row.check == check)
    return row


def results(verification):
    return {row.check: row.result for row in verification.rows}


def assert_first(verification, check, *words):
    """The first difference was found by this check, and its text has these words."""
    assert not verification.ok
    assert verification.difference.check == check
    text = " ".join(str(verification).split())
    for word in words:
        assert word in text, f"{word!r} is not in\n{verification}"


def marked(value, mask, key):
    return {**value, "mark": jax.random.key_data(key)}  # random, and compiled in no time


SOUND = {name: PIPELINES[name] for name in ("host arrays", "host fill", "host, batch of batches", "host map")} | {
    "dropped": lambda: [
        source("sequential"),
        ms.RandomMapTransform(marked),
        ms.BatchTransform(4, drop_last=True),
        ms.FlattenImageTransform(),
    ],
    "repeated": lambda: [ms.HostArraySource(X, ms.Shuffle("repeat")), ms.RandomHostMapTransform(shaken), BATCH],
    "wrapped": lambda: [ms.HostArraySource(X), ms.BatchTransform(4, pad_last_batch=False)],
    "function": lambda: [ms.DiskSampleSource(SAMPLES, sample, prefetch_size=6), ms.BatchTransform(4, drop_last=True)],
}


def shaken(value, rng):
    return {**value, "noise": rng.random(2, np.float32)}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_pipeline_keeps_all_promises(name):
    verification = verified(SOUND[name](), executors=[ms.Threads(3)])
    assert verification.ok, verification
    assert set(results(verification).values()) == {"ok"}
    assert all("equal bit for bit" in row.evidence for row in verification.rows if row.check != "samples")


def test_the_usual_executors_are_compared_and_nothing_is_left_behind(assert_nothing_is_left):
    loader = ms.DataLoader(PIPELINES["host random map"](), executor=ms.Threads(2))
    verification = loader.verify(jax.random.key(3))
    assert loader.stats().batches == 0  # what it has counted is its own
    assert_nothing_is_left()
    assert dict.fromkeys(results(verification)) == dict.fromkeys(["stages", "samples", "executors", "resume", "hosts"])
    text = " ".join(str(verification).split())
    for words in (
        "11 samples read again, in a different order, alone: equal bit for bit",
        "11 samples, each once in an epoch; 19 read in 5 batches, none twice, masks as planned",
        "iterate, next_batch, next_batch in jax.jit, scan_epoch (3), no executor, Threads(1), Threads(3), "
        "Processes(2): 5 batches, equal bit for bit",
        "saved and resumed before steps 1, 2, 3, 4, seeking: 5 batches, equal bit for bit",
        "1 host, 2 hosts, 4 hosts: 5 batches, equal bit for bit",
    ):
        assert words in text, verification


def test_a_stream_is_drawn_twice_and_resumed_through_a_checkpoint():
    verification = verified([source("sequential"), lambda inner: Echo(inner), BATCH])
    assert results(verification) == {
        "stages": "ok",
        "samples": "left out",
        "executors": "ok",
        "resume": "ok",
        "hosts": "left out",
    }
    assert "saved through a checkpoint and resumed before steps" in str(verification)


def test_python_objects_are_compared_where_they_can_go():
    words = [{"text": "a" * number, "box": np.arange(number)} for number in range(SAMPLES)]
    verification = verified([ms.DatasetSource(words), BATCH], executors=[ms.Threads(2)])
    assert verification.ok, verification
    assert "iterate, next_batch, Threads(2): 5 batches" in str(verification)
    assert "jax.jit and scan_epoch are left out" in str(verification)


def test_what_cannot_go_to_a_worker_is_left_out_with_the_reason():
    lock = threading.Lock()

    def locked(index):
        with lock:
            return {"x": np.float32(index)}

    verification = verified([ms.DiskSampleSource(SAMPLES, locked), BATCH], executors=[ms.Processes(1)])
    assert verification.ok
    assert "Processes(1) is left out: the pipeline cannot be sent to a worker: TypeError" in str(verification)


def same(value):
    return value


def noisy(value):
    return {"x": value["x"] + np.random.rand(2).astype(np.float32)}


def noisy_in_python(value):
    return {"x": value["x"] + np.float32(random.random())}


@pytest.mark.parametrize(("fn", "generator"), [(noisy, "np.random"), (noisy_in_python, "Python's random module")])
def test_a_function_that_draws_from_a_global_generator_is_named(fn, generator):
    stages = [ms.HostArraySource(X), ms.HostMapTransform(same), ms.HostMapTransform(fn), BATCH]
    name = f"HostMapTransform({fn.__name__})"
    verification = verified(stages)
    assert_first(verification, "stages", f"{name}, sample", "read again", "sample['x'][0]", generator, "RandomHostMap")
    assert results(verification)["samples"] == "ok"
    assert {results(verification)[check] for check in ("executors", "resume", "hosts")} == {"failed"}


def test_the_innermost_stage_that_differs_is_named():
    calls = itertools.count()

    def counted(index):
        return {"x": np.float32(next(calls))}

    stages = [ms.DiskSampleSource(SAMPLES, counted, SPEC), ms.HostMapTransform(same), BATCH]
    assert_first(verified(stages), "stages", "DiskSampleSource(counted), sample", "such as a counter, the time")


class OwnSource:
    """A user's own source, whose `read` does what a function says."""

    ordering = "shuffle"
    arrays = None

    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return SAMPLES

    def spec(self):
        return {"x": jax.ShapeDtypeStruct((2,), np.float32)}

    def read(self, indices, out=None):
        return {"x": X["x"][self._rows(indices)]}


def test_a_source_that_does_not_look_at_the_index_is_named():
    verification = verified([OwnSource(lambda indices: np.arange(len(indices))), BATCH])
    assert_first(verification, "stages", "OwnSource, sample", "read in a different order", "must be sample indices[i]")
    assert results(verification)["hosts"] == "failed"


def test_a_source_that_gives_a_sample_only_beside_others_is_named():
    verification = verified([OwnSource(lambda indices: indices if len(indices) > 1 else indices * 0), BATCH])
    assert_first(verification, "stages", "OwnSource, sample", "read alone")


def test_a_source_whose_arrays_are_not_what_it_reads_is_named():
    class Twofold(OwnSource):
        @property
        def arrays(self):
            return {"x": jnp.zeros((SAMPLES, 2))}

        ordering = "sequential"  # which compiles faster

    verification = verified([Twofold(lambda indices: indices), BATCH])
    assert_first(verification, "stages", "Twofold, sample", "by `arrays` and by `read`")


def test_samples_that_are_all_alike_are_noted():
    verification = verified([ms.DiskSampleSource(SAMPLES, lambda index: {"x": np.float32(3)}), BATCH])
    assert verification.ok
    assert "all are equal: does DiskSampleSource(<lambda>) look at the index?" in str(verification)


def test_a_function_that_behaves_otherwise_in_a_worker_is_named():
    def told(index):
        return {"x": np.float32(index + 100 * ms.reading.is_worker())}

    verification = verified([ms.DiskSampleSource(SAMPLES, told), BATCH], executors=[ms.Processes(1)])
    assert_first(verification, "executors", "Processes(1), step 0", "A worker process has nothing of this program")
    executors = row_of(verification, "executors")
    assert executors.difference.where.startswith("Processes(1), step 0 (epoch 0, batch 0), row 0, sample ")
    index = int(executors.difference.where.split()[-1])
    assert (executors.difference.expected, executors.difference.found) == (str(float(index)), str(float(index + 100)))


def test_randomness_while_tracing_is_named():
    def fixed(value, mask):
        return {"x": value["x"] * np.random.rand()}

    verification = verified([ms.HostArraySource(X), BATCH, ms.MapTransform(halved), ms.MapTransform(fixed)])
    assert_first(verification, "stages", "MapTransform(fixed), step 0 made twice", "RandomMapTransform(fn)")
    assert results(verification)["executors"] == "failed"


def halved(value, mask):
    return {"x": value["x"] / 2}


def test_a_callback_that_remembers_its_calls_is_named_and_breaks_resuming():
    calls = itertools.count()

    def counting(batch, mask):
        return {"x": batch["x"] + np.float32(next(calls))}

    verification = verified([ms.HostArraySource(X), BATCH, ms.transforms.HostCallbackTransform(counting)])
    assert_first(verification, "stages", "HostCallbackTransform(counting), step 0 made twice", "A callback must")
    resume = row_of(verification, "resume")
    assert resume.difference.where.startswith("saved and resumed, step 0 (epoch 0, batch 0), row 0, sample ")
    assert "not in the state" in resume.difference.cause


def test_a_collate_function_that_mixes_samples_breaks_the_hosts_alone():
    def centered(samples):
        rows = np.stack([one["x"] for one in samples])
        return {"x": rows - rows.mean()}

    verification = verified([ms.HostArraySource(X), ms.BatchTransform(4, collate=centered, drop_last=True)])
    assert_first(
        verification, "hosts", "2 hosts, step 0 (epoch 0, batch 0), row 0, sample", "batch['x'][0, 0]", "collate"
    )
    assert collections.Counter(results(verification).values()) == {"ok": 4, "failed": 1}


@dataclasses.dataclass(frozen=True)
class TwicePlan(Plan):
    """A plan that is wrong: sample 3 comes in place of sample 7."""

    def positions(self, xp, words, rows):
        indices = super().positions(xp, words, rows)
        return xp.where(indices == indices.dtype.type(7), indices.dtype.type(3), indices)


@dataclasses.dataclass(frozen=True)
class UnmaskedPlan(Plan):
    """A plan that is wrong: on the host no row is padding."""

    def rows_at(self, xp, words, step, chosen=None):
        rows = super().rows_at(xp, words, step, chosen)
        return [dataclasses.replace(row, mask=np.ones_like(row.mask)) for row in rows] if xp is np else rows


def with_plan(kind):
    whole: Any = BATCH(source("sequential"))
    plan = kind(**{field.name: getattr(whole.plan, field.name) for field in dataclasses.fields(Plan)})
    return dataclasses.replace(whole, plan=plan)


def test_a_sample_that_comes_twice_is_named():
    verification = verified(with_plan(TwicePlan))
    assert_first(verification, "samples", "epoch 0", "sample 3: once expected, twice found")


def test_a_mask_that_is_not_the_planned_one_is_named():
    verification = verified(with_plan(UnmaskedPlan))
    assert_first(verification, "samples", "epoch 0", "sample 0: once expected, twice found")
    assert results(verification)["executors"] == "failed"  # compiled programs have the mask right


def broken(index):
    if index in (5, 8):
        raise OSError(f"{index}.png is cut short")
    return {"x": np.float32(index)}


def test_a_sample_that_cannot_be_read_is_named():
    verification = verified([ms.DiskSampleSource(SAMPLES, broken, ordering="sequential"), BATCH])
    assert_first(verification, "samples", "step 1, sample 5", "5.png is cut short", 'on_error="skip item"')
    assert results(verification)["executors"] == "ok"  # which raise the same error


@pytest.mark.parametrize("on_error", ["skip item", "skip batch"])
def test_samples_that_are_skipped_are_listed(on_error):
    executor = ms.Threads(2, ordered=on_error == "skip item")
    stages = [ms.DiskSampleSource(SAMPLES, broken), BATCH]
    verification = verified(stages, executor=executor, on_error=on_error)
    assert verification.ok, verification
    shown = " ".join(str(verification).split())
    assert "5.png is cut short" in shown and "8.png is cut short" in shown
    assert ("the loader as it is" in str(verification)) == (on_error == "skip batch")


def test_a_cache_of_older_data_is_found(folder):
    stages = [ms.HostArraySource({"x": X["x"].copy()}), BATCH]
    cached = ms.DataLoader(stages, cache=ms.BatchCache(folder / "cache"))
    assert "the cache is left out" in str(cached.verify(executors=[], hosts=[]))
    for _ in cached.iterate(cached.init_state(jax.random.key(0))):
        pass
    assert "iterate, the cache, next_batch" in str(cached.verify(executors=[], hosts=[]))
    stages[0].data["x"][4] += 1
    verification = verified(stages, cache=ms.BatchCache(folder / "cache"))
    assert_first(verification, "executors", "the cache, step", "row", "sample 4", "delete its folder")


@pytest.mark.parametrize(("apart", "result"), [(1e-8, "ok"), (1e-3, "failed")])
def test_rounding_is_noted_and_more_than_rounding_is_a_difference(apart, result):
    traces = itertools.count()

    def moved(value, mask):  # every program adds something else
        return {"x": value["x"] + jnp.float32(apart * next(traces))}

    verification = verified([ms.HostArraySource(X), BATCH, ms.MapTransform(moved)])
    assert results(verification)["executors"] == result
    assert ("batch['x'] differs by at most" in str(verification)) == (result == "ok")


def test_only_the_last_bits_of_floats_are_rounding():
    x = np.array([1.0, -3.0, np.nan], np.float32)
    assert compare("x", x, x.copy()) == []
    (close,) = compare("x", x, np.nextafter(x, np.float32(9)))
    assert close.rounding == 2**-22 and close.shown == "x[0]"
    assert compare("x", x, x + np.float32(0.001))[0].rounding is None
    assert compare("x", x, np.array([1.0, np.inf, np.nan], np.float32))[0].rounding is None
    assert compare("x", np.array([3]), np.array([4]))[0].rounding is None
    assert compare("x", {"a": x}, {"b": x})[0].expected != compare("x", {"a": x}, {"b": x})[0].found


def test_a_difference_raises_with_the_table():
    loader = ms.DataLoader([ms.HostArraySource(X), ms.HostMapTransform(noisy), BATCH])
    with pytest.raises(ms.errors.VerificationFailed, match="HostMapTransform") as caught:
        loader.verify(executors=[], hosts=[], progress=False)
    assert isinstance(caught.value, AssertionError)
    assert str(caught.value.verification) in str(caught.value)
    assert "check      result" in str(caught.value)


def test_what_there_was_no_time_for_is_not_claimed():
    stages = [ms.DiskSampleSource(100_000_000, lambda index: {"x": np.float32(index)}, SPEC, "sequential"), BATCH]
    verification = ms.DataLoader(stages).verify(seconds=1e-6, executors=[], progress=False)
    text = " ".join(str(verification).split())
    assert "8 read in 2 batches" in text and "each once" not in text
    assert "scan_epoch is left out: an epoch of 25,000,000 batches is too much to make at once." in text
    assert "next_batch in jax.jit: 2 batches" in text and "16 samples read again" in text


def test_ctrl_c_stops_it_at_once_and_ends_all_reading(assert_nothing_is_left):
    def pressed(index):
        if index == 9 and threading.current_thread() is not threading.main_thread():
            _thread.interrupt_main()
        return {"x": np.float32(index)}

    loader = ms.DataLoader([ms.DiskSampleSource(SAMPLES, pressed), BATCH], executor=ms.Threads(2))
    with pytest.raises(KeyboardInterrupt):
        loader.verify(executors=[], progress=False)
    assert_nothing_is_left()


def test_a_line_on_a_terminal_says_how_far_it_is(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    ms.DataLoader([ms.HostArraySource(X), BATCH]).verify(executors=[], hosts=[])
    assert "verify: stages" in terminal.getvalue() and "batch 1 of 5" in terminal.getvalue()


def test_wrong_arguments_are_refused():
    loader = ms.DataLoader([ms.HostArraySource(X), BATCH])
    with refuses(TypeError, "verify needs a key such as jax.random.key(0)", "7 (int)"):
        loader.verify(7)  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "verify needs steps to be an int of at least 1", "0 (int)"):
        loader.verify(steps=0)
    with refuses(ValueError, "verify needs seconds to be a number above 0", "-1 (int)"):
        loader.verify(seconds=-1)
    with refuses(TypeError, "verify needs executors", "[4] (list)"):
        loader.verify(executors=[4])  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "verify needs every number of hosts to be an int of at least 1", "0 (int)"):
        loader.verify(hosts=[0])
    with refuses(TypeError, "verify needs loader to be a DataLoader", "[4] (list)"):
        ms.inspect.verify([4])  # pyright: ignore[reportArgumentType]
    with refuses(TypeError, "verify needs a loader that was built"):
        jax.tree.map(lambda leaf: leaf, loader).verify()


ON_FOUR_DEVICES = """
    import jax, numpy as np, millstream as ms

    stages = [ms.HostArraySource({"x": np.arange(22.0).reshape(11, 2)}), ms.BatchTransform(8)]
    print(ms.DataLoader(stages).verify(executors=[]))
    print(ms.DataLoader(stages, sharding=jax.make_mesh((4,), ("data",))).verify(executors=[]))
    doubled = [*stages, ms.MapTransform(lambda batch, mask: 2 * batch["x"])]
    tuning = ms.DataLoader(doubled, sharding=jax.make_mesh((4,), ("data",))).tune(seconds=0.5, progress=False)
    print([stage.stage for stage in tuning.stages], tuning.code)
"""


def test_batches_over_several_devices_are_compared_with_those_on_one_and_tuned():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(ON_FOUR_DEVICES)]
    run = subprocess.run(command, env={**os.environ, **flags}, capture_output=True, text=True, timeout=300)
    text = " ".join(run.stdout.split())
    assert "scan_epoch, 4 devices: 4 batches, equal bit for bit" in text, run.stdout + run.stderr
    assert "one device: 4 batches, equal bit for bit" in text, run.stdout
    assert "'hand-over', 'compiled stages'] ms.DataLoader(pipeline, executor=" in text, run.stdout + run.stderr
    assert text.endswith("sharding=sharding)"), run.stdout
