"""Several processes load together: the same global batches, on any number of hosts, and nothing lost when one dies.

The processes are real ones, joined by `jax.distributed` over the loopback, with eight devices in all. What needs no
devices, where rows are and what is in them, is tested for up to 1,024 hosts in this process.
"""

import collections
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import CACHE, STRICT, free_address
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from many_hosts_script import steered

import millstream as ms
from millstream.plan.ordering import Shuffle
from millstream.plan.plan import Batching, Plan
from millstream.sharding.batch_sharding import rows_on_grid

SCRIPT = pathlib.Path(__file__).parent / "many_hosts_script.py"
SAMPLES, DEVICES, PATIENCE = 56, 8, 300.0
KILLED_AT, EPOCH = 3, 7  # the epoch that one run goes through on 4, 2, 1 and again 4 processes
WORDS = np.array([5, 6], np.uint32)


@dataclasses.dataclass
class Process:
    """What one process of a group has told, and how it ended."""

    code: int
    ended: float
    told: list[dict]
    errors: str

    def having(self, name):
        return [facts for facts in self.told if name in facts]


def run_group(folder, count, first, last, killed_at, *parts):
    """Run that many processes to their end, in at most `PATIENCE` seconds."""
    address = free_address()
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={DEVICES // count}"]
    flags = " ".join([*flags, "--xla_backend_optimization_level=0"])  # what takes time here is compiling
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment |= CACHE if killed_at < 0 else {}
    started, ended = [], {}
    for number in range(count):
        command = [sys.executable, *STRICT, SCRIPT, address, *map(str, (count, number, first, last, killed_at))]
        with open(folder / f"{number}.out", "wb") as out, open(folder / f"{number}.err", "wb") as err:
            started.append(subprocess.Popen([*command, *parts], env=environment, cwd=folder, stdout=out, stderr=err))
    begun = time.monotonic()
    try:
        while len(ended) < count and time.monotonic() < begun + PATIENCE:
            ended |= {
                number: time.monotonic() - begun
                for number, process in enumerate(started)
                if number not in ended and process.poll() is not None
            }
            time.sleep(0.02)
    finally:
        for process in started:
            process.kill()
            process.wait()
    group = [
        Process(process.returncode, ended.get(number, np.inf), *read_output(folder, number))
        for number, process in enumerate(started)
    ]
    assert len(ended) == count, f"{len(ended)} of {count} ended in {PATIENCE} s\n{show(group)}"
    return group


def read_output(folder, number):
    lines = [line for line in (folder / f"{number}.out").read_text().splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines], (folder / f"{number}.err").read_text()


def show(group):
    return "\n".join(
        f"--- process {number} of {len(group)}, code {process.code}, last told {process.told[-1:]}\n{process.errors}"
        for number, process in enumerate(group)
    )


@pytest.fixture(scope="module")
def groups(tmp_path_factory, once_per_run):
    """One run over an epoch, on 4 processes until one is killed, then on 2, 1 and 4; and batches of all kinds."""
    parts = {
        "killed": (4, 0, EPOCH, KILLED_AT),
        "2": (2, KILLED_AT, 5, -1, "batches", "refusals"),
        "1": (1, 5, 6, -1, "batches"),
        "4": (4, 6, EPOCH, -1, "batches", "refusals"),
    }

    def run_all():
        folders = {name: tmp_path_factory.mktemp("group") for name in parts}
        # What is left of a group with a killed process waits for ten seconds, in which the others can run.
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            started = {name: pool.submit(run_group, folders[name], *given) for name, given in parts.items()}
        return {name: group.result() for name, group in started.items()}

    return once_per_run(run_all)


def case(groups, group, name):
    return [next(facts for facts in process.told if facts.get("case") == name) for process in groups[group]]


def joined(parts):
    """The rows of all processes. Those that several have must be the same."""
    rows = {}
    for part in parts:
        for row, content in part.items():
            assert rows.setdefault(int(row), content) == content
    return rows


CASES = [
    "threads, data",
    "threads, data and model",
    "threads, rows on two hosts",
    "no executor, fsdp, stages",
    "processes, data",
    "arrays, data and model, stages",
    "sharded arrays, data",
    "no executor, view",
    "arrays, view",
]


def test_all_processes_end_well_unless_one_is_killed(groups):
    for name in ("2", "1", "4"):
        assert [process.code for process in groups[name]] == [0] * len(groups[name]), show(groups[name])
        assert all(process.told[-1] == {"finished": True} for process in groups[name])


@pytest.mark.parametrize("name", CASES)
def test_global_batches_are_the_same_on_any_number_of_processes(groups, name):
    by_count = {}
    for count in ("1", "2", "4"):
        told = case(groups, count, name)
        by_count[count] = [joined(facts["rows"][step] for facts in told) for step in range(6)]
        assert all(sorted(rows) == list(range(16)) for rows in by_count[count])
        assert joined(facts["third"] for facts in told) == by_count[count][2]  # next_batch
        assert [facts["step"] for facts in told] == [2] * len(told)
    assert by_count["1"] == by_count["2"] == by_count["4"]


def test_reading_and_gathering_give_the_same_batches(groups):
    kinds = {name: next((kind for kind in ("stages", "view") if kind in name), "plain") for name in CASES}
    for chosen in ("plain", "stages", "view"):
        alike = [case(groups, "4", name) for name in CASES if kinds[name] == chosen]
        steps = [[joined(facts["rows"][step] for facts in told) for step in range(6)] for told in alike]
        assert all(other == steps[0] for other in steps)


@pytest.mark.parametrize("count", ["1", "2", "4"])
def test_each_process_reads_its_own_rows_and_no_others(groups, count):
    for name in CASES[:4]:
        told = case(groups, count, name)
        assert all(facts["reads"] == facts["held"] for facts in told)
        copies = 2 if (name, count) == ("threads, rows on two hosts", "4") else 1
        # The first of the six batches are an epoch, the last of them half empty; then come two whole ones.
        assert sum(len(facts["reads"]) for facts in told) == (SAMPLES + 2 * 16) * copies
        assert len({len(facts["rows"][0]) for facts in told}) == 1


@pytest.mark.parametrize("count", ["1", "2", "4"])
def test_a_cache_gives_each_process_its_own_rows(groups, count):
    for process in groups[count]:
        (facts,) = process.having("cached")
        assert (facts["cached"], facts["wrong"]) == (4, 0)


@pytest.mark.parametrize("count", ["1", "2", "4"])
def test_every_process_counts_the_rows_that_the_global_mask_counts(groups, count):
    expected = {"masked": len(range(0, SAMPLES, 3)), "skipped": SAMPLES - len(range(0, SAMPLES, 5))}
    for process in groups[count]:
        told = process.having("counted")
        assert [facts["counted"] for facts in told] == ["masked", "masked", "skipped"]
        assert all(facts["samples"] == facts["summed"] == expected[facts["counted"]] for facts in told)


@pytest.mark.parametrize("count", ["1", "2", "4"])
def test_batches_that_grow_and_steps_that_are_left_out_are_those_of_one_device(groups, count):
    expected = [list(run) for run in steered()]
    assert expected[0] == expected[1] and expected[0][0] == 2 * 8 + 4 * 16
    for process in groups[count]:
        (told,) = process.having("steered")
        assert told["steered"] == expected


@pytest.mark.parametrize("count", ["1", "2", "4"])
def test_sums_over_an_uneven_epoch_are_those_of_one_process(groups, count):
    whole = [float(sum(range(SAMPLES))), SAMPLES]
    for process in groups[count]:
        (sums,) = process.having("sums")
        assert (sums["sums"], sums["scanned"], sums["step"]) == (whole, whole, 4)


def test_a_run_whose_process_was_killed_goes_on_with_what_remains_on_any_number_of_processes(groups):
    seen, steps = [], []
    for group in groups.values():
        for process in group:
            seen += [index for facts in process.having("indices") for index in facts["indices"]]
        steps += [facts["step"] for facts in group[0].having("indices")]
    assert steps == list(range(EPOCH))
    assert sorted(seen) == list(range(SAMPLES))
    assert {facts["total"] for group in groups.values() for facts in group[0].having("total")} == {8}


def test_a_killed_process_ends_the_others_in_time_with_an_error(groups):
    *others, killed = groups["killed"]
    assert killed.code == -signal.SIGKILL
    for process in others:
        assert process.code not in (0, -signal.SIGKILL), show(groups["killed"])  # -9 would be the watchdog of the test
        assert process.ended - killed.ended < 30  # its heartbeat is missed after 10 s
        assert "another task died" in process.errors or "Connection" in process.errors, process.errors
        assert process.told[-1]["step"] == KILLED_AT - 1


WORDS_ON_ONE_PROCESS = {
    "key": ("iterate", "key: 0000000004000000 in process {odd}, 0000000003000000 in {others}"),
    "step": ("iterate", "step: 1 in process {odd}, 0 in {others}"),
    "length": ("iterate", "samples: 64 in process {odd}, 56 in {others}"),
    "arrays": ("iterate", "samples: 64 in process {odd}, 56 in {others}"),
    "pipeline": (
        "iterate",
        "stages: BatchTransform, MapTransform(<lambda>) in process {odd}, BatchTransform in {others}",
    ),
    "stepping": ("next_batch", "key: 0000000004000000 in process {odd}, 0000000003000000 in {others}"),
    "scan": ("scan_epoch", "key: 0000000004000000 in process {odd}, 0000000003000000 in {others}"),
}


@pytest.mark.parametrize("count", ["2", "4"])
@pytest.mark.parametrize("what", WORDS_ON_ONE_PROCESS)
def test_processes_that_disagree_all_say_who_differs_in_what(groups, count, what):
    caller, words = WORDS_ON_ONE_PROCESS[what]
    for process in groups[count]:
        (said,) = (facts["words"] for facts in process.having("words") if facts["refused"] == what)
        assert said.startswith(f"{caller} needs all processes to read the same. They differ:\n  "), said
        assert words.format(odd=int(count) - 1, others={"2": "1 other", "4": "3 others"}[count]) in said


@pytest.mark.parametrize("count", ["2", "4"])
@pytest.mark.parametrize(
    "what, words",
    [
        ("batch size", "divides by 8, the devices that rows are divided over (mesh axes: 'data' of size 8)"),
        ("batch size", "Got 20. Take 16 or 24."),
        ("unordered", "DataLoader with a sharding over several processes needs an executor with ordered=True"),
        ("skip batch", 'cannot skip batches. Use on_error="skip item".'),
        ("callback", "A compiled program over several processes cannot read samples on the host. Use iterate"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_by_each(groups, count, what, words):
    for process in groups[count]:
        assert [words in facts["words"] for facts in process.having("words") if facts["refused"] == what] == [True]
        assert process.having("refused")[-1]["refused"] == "nothing"  # and loading works after all that


# Refusals that need no second process


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()[:1]), ("data",))


@pytest.fixture
def source():
    return ms.ArraySampleSource({"x": np.arange(24.0, dtype=np.float32)})


def test_a_mesh_without_the_axis_is_refused(source):
    mesh = Mesh(np.array(jax.devices()[:1]), ("rows",))
    with pytest.raises(ValueError, match=r"no axis 'data' to divide a batch over\. The mesh has: 'rows'"):
        ms.DataLoader([source, ms.BatchTransform(8)], sharding=mesh)


def test_a_sharding_needs_batches(source, mesh):
    with pytest.raises(TypeError, match=r"needs an indexed source and a BatchTransform after it"):
        ms.DataLoader([source], sharding=mesh)


def test_a_sharding_and_a_device_contradict_each_other(source, mesh):
    stages = [source, ms.BatchTransform(8), ms.DevicePutTransform(jax.devices()[0])]
    with pytest.raises(ValueError, match=r"says already where batches go\. Leave out the device"):
        ms.DataLoader(stages, sharding=mesh)
    loader = ms.DataLoader([source, ms.BatchTransform(8), ms.DevicePutTransform()], sharding=mesh)
    batch, _, _ = loader.next_batch(loader.init_state(jax.random.key(0)))
    assert batch["x"].sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 1)


def test_arrays_that_lie_on_a_mesh_with_explicit_axes_are_gathered_from_there():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    data = jax.device_put(np.arange(24.0, dtype=np.float32), NamedSharding(mesh, P("data")))
    loader = ms.DataLoader([ms.ArraySampleSource({"x": data}), ms.BatchTransform(8)], sharding=mesh)
    batches = [batch["x"] for batch, _ in loader.iterate(loader.init_state(jax.random.key(0)))]
    assert {batch.sharding.mesh for batch in batches} == {mesh}
    assert sorted(row for batch in batches for row in batch.tolist()) == list(range(24))


def test_on_one_process_batches_may_overtake_and_be_skipped(source, mesh):
    options = {"executor": ms.Threads(2, ordered=False), "on_error": "skip batch"}
    loader = ms.DataLoader([source, ms.BatchTransform(8)], sharding=mesh, **options)
    seen = [row for batch, _ in loader.iterate(loader.init_state(jax.random.key(0))) for row in batch["x"].tolist()]
    assert sorted(seen) == list(range(24))


# Up to 1,024 hosts and 10^12 samples, simulated

SHUFFLES = [Shuffle(mode, first) for mode in ("itemwise", "reseed", "repeat", "batchwise") for first in (True, False)]
ENDINGS = st.sampled_from(["pad", "drop", "wrap"])
FEW, MANY = st.integers(1, 64), st.sampled_from([256, 1000, 1024]) | st.integers(1, 1024)


@st.composite
def grids(draw, hosts):
    """The process of each device of a mesh (data, model), the axes that divide rows, and the rows of a batch."""
    data_axis = draw(hosts)
    model_axis = draw(st.sampled_from([1, 2, 8]))
    devices = np.arange(data_axis * model_axis)
    per_host = draw(st.sampled_from([d for d in (1, 2, 4, 8) if len(devices) % d == 0 and len(devices) <= 1024 * d]))
    processes = (devices // per_host).reshape(data_axis, model_axis)
    axes = draw(st.sampled_from([(0,), (0, 1)]))
    shards = data_axis * (model_axis if len(axes) == 2 else 1)
    return processes, axes, shards * draw(st.integers(1, 3))


def make_plan(samples, shuffle, size, ending):
    ending = "pad" if shuffle.recurs and ending == "wrap" else ending
    return Plan(samples, shuffle, (Batching(size, ending, samples),))


@settings(max_examples=30)
@given(
    grid=grids(MANY),
    samples=st.integers(1, 10**12) | st.integers(0, 40).map(lambda power: min(1 << power, 10**12)),
    shuffle=st.sampled_from(SHUFFLES),
    ending=ENDINGS,
    place=st.floats(0, 1),
)
def test_rows_of_all_hosts_are_the_global_batch(grid, samples, shuffle, ending, place):
    processes, axes, size = grid
    if ending == "drop" and size > samples:
        return
    plan = make_plan(samples, shuffle, size, ending)
    step = int(place * min(2 * plan.steps_per_epoch, plan.step_limit - 1))
    indices, (_, rows) = plan.at(np, WORDS, step)
    seen = np.zeros(size, int)
    for chosen in rows_on_grid(processes, axes, size).values():
        own, (_, own_rows) = plan.at(np, WORDS, step, chosen=chosen)
        np.testing.assert_array_equal(own, indices[chosen])
        np.testing.assert_array_equal(own_rows.mask, rows.mask[chosen])
        np.testing.assert_array_equal(own_rows.epoch, rows.epoch[chosen])
        seen[chosen] += 1
    assert seen.min() > 0
    if axes == (0, 1) or processes.shape[1] == 1:
        assert seen.max() == 1
    assert indices.max() < samples


@given(
    first=grids(FEW),
    second=grids(FEW),
    samples=st.integers(1, 3000),
    shuffle=st.sampled_from(SHUFFLES),
    ending=ENDINGS,
    data=st.data(),
)
def test_an_epoch_that_changes_hosts_in_its_middle_visits_every_sample_once(
    first, second, samples, shuffle, ending, data
):
    size = int(np.lcm(first[2], second[2]))
    if ending == "drop" and size > samples:
        return
    plan = make_plan(samples, shuffle, size, ending)
    change = data.draw(st.integers(0, plan.steps_per_epoch))
    counts = collections.Counter()
    for step in range(plan.steps_per_epoch):
        processes, axes, _ = first if step < change else second
        owner = {}
        for chosen in rows_on_grid(processes, axes, size).values():
            own, (_, rows) = plan.at(np, WORDS, step, chosen=chosen)
            owner |= dict(zip(chosen.tolist(), zip(own.tolist(), rows.mask.tolist(), strict=True), strict=True))
        counts.update(index for index, real in owner.values() if real)
    ending = plan.batchings[0].ending
    if ending == "pad":
        assert counts == collections.Counter(range(samples))
    elif ending == "drop":
        assert counts.total() == len(counts) == samples // size * size
    else:  # the last batch is completed from the next epoch
        assert len(counts) == samples and counts.total() == size * plan.steps_per_epoch
