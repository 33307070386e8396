"""The hydrax dialect: the code of its README runs, and does what the text says, also where the original did not.

Functions that loader processes call are made inside functions, so that they travel by value and bring no JAX along.
"""

import ast
import gc
import io
import itertools
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pytest
from conftest import CACHE, code_blocks
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from test_bad_input import refuses
from worker_processes import children

import millstream as ms
from millstream.dialects.hydrax import (
    Batch,
    BatchTimeoutError,
    DataGroup,
    Dataloader,
    TrainingBatch,
    ValidationBatch,
    debug_batch_references,
    image,
    is_worker,
)
from millstream.dialects.hydrax.pandas import RowData
from millstream.dialects.hydrax.tqdm import tbatches
from millstream.loader.mixed import SequentialOrder

SEED = pathlib.Path(__file__).parent / "seeds" / "004_hydrax.md"
ARRAYS = {"x": ((2,), np.uint8, jnp.float32), "label": ((), np.int32, jnp.int32)}
LATENTS = {"z": ((), np.float32, jnp.float32)}


def loader(log=None):
    """Fills what is asked for with the number it is given, and returns what it was given."""

    def load(number, arrays, seed):
        arrays["x"][:] = number
        arrays["label"][...] = 2 * number
        if log is not None:
            with open(log, "a") as file:
                file.write(f"{number}\n")
        return {"number": number, "seed": seed} if number % 2 else None

    return load


def group(items: Any = range(10), batch_size: int = 4, **options: Any) -> DataGroup[Any]:
    """A group whose epochs are the same, unless it says otherwise: shuffling takes long to trace."""
    return DataGroup(batch_size, items, **{"loader_arrays": ARRAYS, "shuffle_later": "repeat", **options})


def batches(*groups: DataGroup[Any], function: Any = None, **options: Any) -> tuple[list[Batch[Any]], Dataloader[Any]]:
    """All batches, and the loader they came from."""
    with Dataloader(function or loader(), groups, **{"end_at": ("epoch", 1), **options}) as dataloader:
        return list(dataloader), dataloader


def numbers(batch):
    return [int(number) for number in batch.arrays["label"] // 2]


def kinds(found):
    return "".join("t" if batch.is_training else "v" for batch in found)


# The code of the README


PRELUDE = """
import jax.numpy as jnp, numpy as np
dim, numpy_dtype, jax_dtype, batch_size = 3, np.uint8, jnp.float32, 100
ran = []
def run_training_batch(batch):
    ran.append(("t", batch.data[0], batch.arrays["array_name"].shape, float(batch.arrays["array_name"].sum())))
def run_validation_batch(batch):
    ran.append(("v", batch.data[0], batch.arrays["array_name"].shape, float(batch.arrays["array_name"].sum())))
def run_any_batch(batch):
    run_training_batch(batch) if isinstance(batch, TrainingBatch) else run_validation_batch(batch)
"""
FILLED = [
    ("    # return any additional data for the batch\n", '    arrays["array_name"][:] = data % 100\n'),
    ("my_data = ...\n", "my_data = range(1200)\n"),
    ("((dim, ...), numpy_dtype, jax_dtype),\n        ...\n", "((dim,), numpy_dtype, jax_dtype),\n"),
]


def readme_script(bars):
    (block,) = code_blocks(SEED.read_text(encoding="utf-8"))
    block = block.replace("from hydrax.tdqm import", "from millstream.dialects.hydrax.tqdm import")
    block = block.replace("from hydrax import", "from millstream.dialects.hydrax import")
    for placeholder, filling in FILLED:
        assert placeholder in block
        block = block.replace(placeholder, filling)
    plain, with_bars = block.split("# with hydrax.tqdm.tbatches\n")
    if bars:  # in the place of the `with` block
        assert "        ...\n" in with_bars
        plain = plain[: plain.index("    with dataloader:")] + with_bars.replace("...", "run_any_batch(batch)")
    return PRELUDE + plain


@pytest.fixture(scope="module")
def readme_runs(memory, once_per_run):
    """What both scripts of the README ran, and what they showed."""
    return once_per_run(lambda: run_readme(memory))


def run_readme(memory):
    """Run both scripts in one process; as the text has it, their name is "main"."""
    code = "import sys\nfor path in sys.argv[1:]:\n    names = {'__name__': 'main'}\n"
    code += "    exec(compile(open(path).read(), path, 'exec'), names)\n    print(names['ran'])"
    paths = [memory / "plain.py", memory / "bars.py"]
    for path in paths:
        path.write_text(readme_script(bars=path.stem == "bars"))
    ran = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | CACHE,
    )
    assert ran.returncode == 0, ran.stderr
    return [ast.literal_eval(line) for line in ran.stdout.splitlines()], ran.stderr


def test_the_code_of_the_readme_runs_five_epochs_with_validation_after_each(readme_runs):
    runs, _ = readme_runs
    assert len(runs) == 2
    for ran in runs:
        assert "".join(kind for kind, *_ in ran) == 5 * ("tt" + 10 * "v")
        assert [first for _, first, *_ in ran[:12]] == [1000, 1100, *range(0, 1000, 100)]
        # Batches of 100 items, each of which has the last two digits of its number three times.
        assert {(shape, total) for kind, _, shape, total in ran if kind == "v"} == {((100, 3), 3 * 4950.0)}
        for epoch in range(5):
            assert sum(total for _, _, _, total in ran[12 * epoch :][:2]) == 2 * 3 * 4950.0


def test_bars_show_training_and_inside_of_it_validation(readme_runs):
    _, shown = readme_runs
    assert re.search(r"train: +100%.*10/10", shown)
    assert re.search(r"validation: .*0/10", shown)


# What a batch is


def test_a_batch_has_the_arrays_the_additional_data_and_the_descriptors_of_its_items():
    words = group([1, 2, 3, 5, 8])
    (batch,), dataloader = batches(words, depth=1)
    assert isinstance(batch, TrainingBatch) and isinstance(batch, Batch)
    assert (batch.is_training, batch.is_validation) == (True, False)
    assert batch.arrays["x"].tolist() == [[1, 1], [2, 2], [3, 3], [5, 5]]
    assert batch.arrays["x"].dtype == jnp.float32
    assert batch.get_array("label").tolist() == [2, 4, 6, 10]
    assert batch.additional["number"] == [1, None, 3, 5]
    assert batch.get_additional("number", 0) == 1
    assert batch.get_additional("number", 1, default="none") == "none"
    assert batch.get_additional("other") is None and batch.get_additional("other", 2, default=7) == 7
    assert "other" not in batch.additional
    assert len(batch.data) == 4 and list(batch.data) == [1, 2, 3, 5] and list(batch.data[1:3]) == [2, 3]
    assert batch.get_data(-1) == 5
    assert batch.indices == [0, 1, 2, 3]
    assert batch.group is words and batch.group_index == 0
    assert batch.layouts is words.loader_layouts
    assert batch.uncached
    with pytest.raises(TypeError):
        batch.arrays["x"] = 3  # pyright: ignore[reportIndexIssue]
    with refuses(RuntimeError, "batch.cache needs a DataGroup with loader_arrays and cache_arrays"):
        batch.cache(dict(batch.arrays))
    assert (dataloader.batches_per_epoch, dataloader.batches_per_validation) == (1, 0)


def test_a_group_says_what_its_arrays_look_like():
    words = group(range(9))
    assert (len(words), words[3], words.batch_size, words.batch_count) == (9, 3, 4, 2)
    assert words.loader_layouts is not None
    shape, numpy_dtype, jax_dtype, offset, elements = words.loader_layouts["label"]
    assert (shape, numpy_dtype, jax_dtype, elements) == ((4,), np.int32, np.int32, 4)
    assert offset % 64 == 0 and words.loader_size == offset + 4 * 4
    assert words.cache_layouts is None and words.cache_size == 0
    assert group(iter("abc"), 100).batch_size == 3  # of an iterable, and clamped
    assert group(range(3), cache_location="nowhere").cache_layouts is not None


def test_wide_numbers_reach_the_loader_as_they_are_declared_and_jax_as_it_keeps_them():
    def make():
        def load(number, arrays, seed):
            arrays["n"][...] = number
            arrays["f"][...] = 1 / 3
            return {"dtypes": (str(arrays["n"].dtype), str(arrays["f"].dtype)), "f": float(arrays["f"])}

        return load

    wide = {"n": ((), np.int64, jnp.int32), "f": ((), np.float64, jnp.bfloat16)}
    (batch,), _ = batches(group([5, 7], loader_arrays=wide), function=make())
    assert batch.additional["dtypes"] == [("int64", "float64")] * 2
    assert batch.additional["f"] == [1 / 3] * 2
    assert (batch.arrays["n"].tolist(), batch.arrays["n"].dtype) == ([5, 7], jnp.int32)
    assert batch.arrays["f"].dtype == jnp.bfloat16
    with refuses(ValueError, "JAX keeps int64 as int32, but the values run from 1099511627776", "at sample 0"):
        batches(group([2**40], loader_arrays=wide), function=make(), on_error="raise")


# The stream


def test_validation_runs_every_time_and_is_the_same_every_time():
    train, valid = group(shuffle_later="default"), group(range(100, 109), shuffle_later="default")
    found, dataloader = batches(train, validation=("epoch", 1, valid), end_at=("epoch", 3), loader_count=2)
    assert kinds(found) == 3 * "ttvv"
    assert (dataloader.batches_per_epoch, dataloader.batches_per_validation) == (2, 2)
    passes = [batch for batch in found if isinstance(batch, ValidationBatch)]
    assert [numbers(batch) for batch in passes] == 3 * [[100, 101, 102, 103], [104, 105, 106, 107]]
    assert all(set(batch.additional["seed"]) == {None} for batch in passes)
    assert [batch.validation_epoch for batch in passes] == [0, 0, 1, 1, 2, 2]
    assert [batch.validation_epoch_batch for batch in passes] == 3 * [0, 1]
    assert [batch.validation_batch_num for batch in passes] == list(range(6))
    training = [batch for batch in found if isinstance(batch, TrainingBatch)]
    assert [(batch.epoch, batch.epoch_batch, batch.batch_num) for batch in training] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 2),
        (1, 1, 3),
        (2, 0, 4),
        (2, 1, 5),
    ]


def test_validation_can_come_after_batches_and_have_several_groups():
    held_out = [group(range(100, 108)), group(range(200, 204), 2)]
    found, _ = batches(group(), validation=("batch", 3, held_out), end_at=("batch", 7))
    assert kinds(found) == "ttt" + "vvvv" + "ttt" + "vvvv" + "t"
    assert [numbers(batch)[0] for batch in found if batch.is_validation] == 2 * [100, 104, 200, 202]


def test_groups_interleave_and_an_epoch_goes_through_all_of_them():
    small, large = group(range(100, 104), 2), group(range(12), 2, shuffle_later="default")
    found, _ = batches(small, large, end_at=("epoch", 2))
    for epoch in (found[:8], found[8:]):
        order = "".join("s" if batch.group is small else "l" for batch in epoch)
        assert order.count("s") == 2
        assert order.index("s") < 4 <= order.rindex("s")
        assert sorted(itertools.chain(*map(numbers, epoch))) == [*range(12), *range(100, 104)]


def test_groups_can_come_one_after_the_other():
    found, _ = batches(group(range(100, 104), 2), group(range(4), 2), interleave_groups=False)
    assert [numbers(batch) for batch in found] == [[100, 101], [102, 103], [0, 1], [2, 3]]


def test_shuffling_is_as_each_group_has_it():
    modes = ["repeat", "reseed", "itemwise", "batchwise"]
    groups = [group(range(10 * n, 10 * n + 8), 2, shuffle_later=mode) for n, mode in enumerate(modes)]
    groups.append(group(range(40, 48), 2, shuffle_first=True, shuffle_later="repeat"))
    found, _ = batches(*groups, end_at=("epoch", 2), interleave_groups=False)
    for n, mode in enumerate([*modes, "first"]):
        parts = [[b for b in found if b.group is groups[n] and b.epoch == epoch] for epoch in (0, 1)]  # pyright: ignore
        first, second = ([numbers(batch) for batch in part] for part in parts)
        seeds = [[batch.seeds for batch in part] for part in parts]  # pyright: ignore[reportAttributeAccessIssue]
        sequence = [[10 * n + 2 * k, 10 * n + 2 * k + 1] for k in range(4)]
        assert (first == sequence) == (mode != "first")
        assert (first == second) == (mode not in ("itemwise", "batchwise"))
        assert (seeds[0] == seeds[1]) == (mode in ("repeat", "first"))
        assert sorted(itertools.chain(*second)) == list(itertools.chain(*sequence))
        if mode == "batchwise":
            assert sorted(second) == first and sorted(seeds[0]) == sorted(seeds[1])
            assert [batch.group_index for batch in parts[1]] == [first.index(items) for items in second]


def test_seeds_are_those_the_loader_was_given_and_groups_with_other_seeds_share_none():
    def make():
        return lambda number, arrays, seed: {"seed": seed}

    groups = [group(range(40), seed=seed, shuffle_later="reseed") for seed in (0, 1)]
    found, _ = batches(*groups, function=make(), end_at=("epoch", 2))
    seeds: list[set[int]] = [set(), set()]
    for batch in found:
        assert isinstance(batch, TrainingBatch)
        assert batch.additional["seed"] == batch.seeds and batch.seed == batch.seeds[0]
        seeds[batch.group is groups[1]].update(batch.seeds)
    assert len(seeds[0]) == len(seeds[1]) == 80
    assert not seeds[0] & seeds[1]
    assert max(max(each) for each in seeds) < 2**32


def test_a_run_goes_on_exactly_where_start_at_says():
    valid = group(range(100, 104), 2)
    options = {"validation": ("epoch", 1, valid), "end_at": ("epoch", 3)}
    whole, _ = batches(group(range(8), 2, shuffle_later="itemwise"), **options)
    rest, dataloader = batches(group(range(8), 2, shuffle_later="itemwise"), **options, start_at=(0, 5))
    assert (dataloader.first_batch, dataloader.last_batch) == (5, 12)
    assert Dataloader(loader(), group(range(8), 2), start_at=(1, 1)).first_batch == 5
    assert [(b.is_training, numbers(b), b.additional) for b in rest] == [
        (b.is_training, numbers(b), b.additional) for b in whole[7:]
    ]
    assert isinstance(rest[0], TrainingBatch) and rest[0].batch_num == 5
    passes = [batch for batch in rest if isinstance(batch, ValidationBatch)]
    assert [(batch.validation_epoch, batch.validation_batch_num) for batch in passes[:3]] == [(0, 0), (0, 1), (1, 2)]


def test_an_endless_run_ends_when_it_is_interrupted():
    assert Dataloader(loader(), group(), end_at=("never", 0)).last_batch is None
    seen = []
    with Dataloader(loader(), group()) as dataloader:
        assert dataloader.last_batch is None
        for batch in dataloader:
            seen.append(batch)
            if len(seen) == 5:
                dataloader.interrupt()
    assert dataloader.interrupted and len(seen) == 5


# Weaknesses of the original


def test_retained_batches_never_stall_it_and_who_holds_them_is_told(capsys):
    """No JAX call is made between the batches, either."""
    found, _ = batches(group(range(200), 2), depth=1, timeout_sec=20)
    assert len(found) == 100
    for number, batch in enumerate(found):
        assert batch.arrays["label"].tolist() == [4 * number, 4 * number + 2]
    debug_batch_references()
    told = re.fullmatch(
        r"(\d+) batches are held:\n.*batch 0: item 0 of the list `found`, a local.*", capsys.readouterr().out, re.DOTALL
    )
    assert told is not None and int(told[1]) >= 100  # others of this process may hold some, too


def test_nothing_is_left_behind_however_a_run_ends():
    before = set(children())
    dataloader = Dataloader(loader(), group(), validation=("batch", 1, group()))
    with pytest.raises(ZeroDivisionError), dataloader:
        assert isinstance(next(dataloader), TrainingBatch)
        assert isinstance(next(dataloader), ValidationBatch)
        assert len(set(children()) - before) == 2
        raise ZeroDivisionError
    stream = tbatches(Dataloader(loader(), group()), disable=True)
    next(stream)
    assert len(set(children()) - before) == 1
    del stream
    gc.collect()
    assert set(children()) == before


def failing(*bad):
    def load(number, arrays, seed):
        if number in bad or "all" in bad:
            raise KeyError(f"no image {number}")
        arrays["label"][...] = 2 * number

    return load


def test_a_batch_whose_loader_raises_is_left_out_and_told_of():
    with pytest.warns(RuntimeWarning) as told:
        found, _ = batches(group(range(8), 2), function=failing(3))
    assert [numbers(batch) for batch in found] == [[0, 1], [4, 5], [6, 7]]
    assert [batch.batch_num for batch in found if isinstance(batch, TrainingBatch)] == [0, 2, 3]
    (warning,) = told
    assert "leaves out training batch 1: the loader raised KeyError: 'no image 3' for item 3" in str(warning.message)
    assert "in load" in str(warning.message)  # the traceback of the loader process


def test_an_endless_run_whose_loader_always_raises_ends():
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="left out the last 4 batches") as raised:
        batches(group(range(8), 2), function=failing("all"), end_at=None)
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_loader_that_dies_is_replaced(tmp_path):
    mark = tmp_path / "died"

    def make():
        def load(number, arrays, seed):
            if number == 3 and not mark.exists():
                mark.touch()
                os._exit(1)
            arrays["label"][...] = 2 * number

        return load

    with pytest.warns(UserWarning, match="died|exit"):
        found, _ = batches(group(range(8), 2), function=make())
    assert [numbers(batch) for batch in found] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_no_batch_for_too_long_is_a_timeout():
    def make():
        return lambda number, arrays, seed: time.sleep(600)

    with pytest.raises(BatchTimeoutError, match=r"no batch for 0\.4 s"):
        batches(group(), function=make(), timeout_sec=0.4)
    assert issubclass(BatchTimeoutError, TimeoutError)


# Loader processes


def test_processes_are_started_up_are_nice_and_make_no_loaders():
    def start():
        os.environ["STARTED"] = "yes"

    def make():
        def load(number, arrays, seed):
            from millstream.dialects import hydrax

            refused = ""
            try:
                hydrax.Dataloader(load, [])
            except RuntimeError as error:
                refused = str(error)
            found = {"nice": os.nice(0), "started": os.environ.get("STARTED"), "worker": hydrax.is_worker()}
            return {**found, "refused": refused, "jax": "jax" in sys.modules}

        return load

    (batch,), _ = batches(group(range(1)), function=make(), startup_func=start, loader_nice=3)
    (refused,) = batch.additional["refused"]
    assert "cannot be made in a loader process" in refused
    assert [batch.additional[name][0] for name in ("nice", "started", "worker", "jax")] == [
        os.nice(0) + 3,
        "yes",
        True,
        False,
    ]
    assert not is_worker()


def test_loaders_that_keep_views_are_told_of_when_debugging(capfd):
    def make():
        kept = []

        def load(number, arrays, seed):
            arrays["x"][:] = number
            kept.append(arrays["x"])

        return load

    batches(group(range(4), 2), function=make(), debug=True)
    told = capfd.readouterr().err
    assert "keeps a view of arrays['x']" in told
    assert "leaves elements of arrays['label'] unwritten" in told


def test_importing_the_dialect_loads_no_jax():
    command = (
        "import sys, millstream.dialects.hydrax, millstream.dialects.hydrax.tqdm, millstream.dialects.hydrax.pandas, "
        "millstream.dialects.hydrax.image; assert not {'jax', 'tqdm', 'pandas', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", command], check=True)


# Ctrl-C


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_the_first_ctrl_c_ends_the_stream_which_can_be_resumed(default_handler):
    seen = []
    with Dataloader(loader(), group(range(8), 2), end_at=("epoch", 1)) as dataloader:
        for batch in dataloader:
            seen.append(batch)
            if len(seen) == 2:
                press()
    assert dataloader.interrupted and len(seen) == 2
    rest, again = batches(group(range(8), 2), start_at=(seen[-1].epoch, seen[-1].epoch_batch + 1))
    assert [numbers(batch) for batch in [*seen, *rest]] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert not again.interrupted


def test_the_second_ctrl_c_raises_at_the_next_batch(default_handler):
    seen = []
    with pytest.raises(KeyboardInterrupt), Dataloader(loader(), group()) as dataloader:
        for batch in dataloader:
            press()
            press()
            seen.append(batch)
    assert len(seen) == 1 and dataloader.interrupted


def test_the_third_ctrl_c_ends_the_process_and_the_loader_processes():
    script = """
import os, signal, numpy as np
signal.signal(signal.SIGINT, signal.default_int_handler)
from millstream.dialects.hydrax import DataGroup, Dataloader
data = DataGroup(2, range(100), loader_arrays={"x": ((), np.int32, np.int32)})
with Dataloader(lambda number, arrays, seed: None, data) as dataloader:
    for batch in dataloader:
        for _ in range(3):
            os.killpg(0, signal.SIGINT)
        print("never", flush=True)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, start_new_session=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (130, "")  # which also says that its pipes are closed: nobody is left
    assert "Traceback" not in ran.stderr


# Caches


def loaded(log):
    """How often the loader was called since this was last asked."""
    found = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return len(found)


def test_what_the_loader_fills_is_cached_by_itself(folder):
    log = folder / "log"

    def run(location="cache", seed=0, **options):
        options = {"shuffle_later": "default", **options}
        data = group(range(8), cache_location=folder / location, seed=seed, **options)
        found, _ = batches(data, function=loader(log), end_at=("epoch", 2))
        assert not any(batch.uncached for batch in found)
        return [(numbers(batch), dict(batch.additional)) for batch in found], loaded(log)

    first, calls = run()
    assert calls >= 8
    assert first[2:] in (first[:2], first[1::-1])  # batchwise: the same batches, in some order
    assert run() == (first, 0)
    assert run("nowhere", cache_readonly=True, shuffle_later="repeat")[1] >= 16
    assert not (folder / "nowhere").exists()
    with refuses(ValueError, "BatchCache", "key"):
        run(seed=1)
    data = DataGroup(4, range(8), cache_arrays=ARRAYS, cache_location=folder / "cache")
    found, _ = batches(data, function=loader(log), end_at=("epoch", 2), loader_count=0)
    assert [(numbers(batch), dict(batch.additional)) for batch in found] == first
    assert loaded(log) == 0


def test_what_is_computed_from_batches_comes_in_their_place(folder):
    log = folder / "log"

    def run(epochs, **options):
        options = {"shuffle_later": "default", **options}
        data = group(range(8), cache_arrays=LATENTS, cache_location=folder / "latents", **options)
        found, encoded = [], 0
        with Dataloader(loader(log), data, end_at=("epoch", epochs)) as dataloader:
            for batch in dataloader:
                if batch.uncached:
                    encoded += 1
                    assert batch.layouts is data.loader_layouts
                    more = {"sum": [int(number) for number in batch.arrays["label"]]}
                    batch.cache({"z": batch.arrays["x"][:, 0] * 0.5}, more)
                assert not batch.uncached and batch.layouts is data.cache_layouts
                found.append((batch.arrays["z"].tolist(), batch.additional["sum"], batch.indices))
        return found, encoded, loaded(log)

    found, encoded, _ = run(3)
    assert 2 <= encoded <= 4  # those of the second epoch that were read before the first was stored
    for latents, sums, indices in found:
        assert latents == [0.5 * number for number in indices] and sums == [2 * number for number in indices]
    assert run(3, cache_readonly=True) == (found, 0, 0)
    only = DataGroup(4, range(8), cache_arrays=LATENTS, cache_location=folder / "latents")
    cached, _ = batches(only, loader_count=0, cacher_count=0)
    assert [batch.arrays["z"].tolist() for batch in cached] == [latents for latents, _, _ in found[:2]]
    with refuses(ValueError, "DataGroup", "seed", "0", "1"):
        run(1, seed=1)


def test_computed_arrays_are_kept_by_epoch_if_batches_do_not_come_back(folder):
    def run():
        data = group(range(8), cache_arrays=LATENTS, cache_location=folder / "latents", shuffle_later="itemwise")
        found, encoded = [], 0
        with Dataloader(loader(), data, end_at=("epoch", 2)) as dataloader:
            for batch in dataloader:
                if batch.uncached:
                    encoded += 1
                    batch.cache({"z": batch.arrays["x"][:, 0]})
                found.append(batch.arrays["z"].tolist())
                assert found[-1] == batch.indices
        return found, encoded

    found, encoded = run()
    assert encoded == 4
    assert run() == (found, 0)


def test_memory_that_was_given_to_the_cache_may_be_used_again(folder):
    memory, notes = np.zeros(4, np.float32), [0] * 4
    data = group(range(8), cache_arrays=LATENTS, cache_location=folder / "latents")
    with Dataloader(loader(), data, end_at=("epoch", 1)) as dataloader:
        for batch in dataloader:
            memory[:], notes[:] = batch.arrays["x"][:, 0], batch.indices
            batch.cache({"z": memory}, {"n": notes})  # pyright: ignore[reportArgumentType]
            memory[:], notes[:] = -1, [-1] * 4
            assert batch.arrays["z"].tolist() == batch.additional["n"] == batch.indices
    only = group(range(8), loader_arrays=None, cache_arrays=LATENTS, cache_location=folder / "latents")
    cached, _ = batches(only, loader_count=0, cacher_count=0)
    for batch in cached:
        assert batch.arrays["z"].tolist() == batch.additional["n"] == batch.indices


def test_what_is_wrong_with_cached_arrays_is_said(folder):
    data = group(range(4), 2, cache_arrays=LATENTS, cache_location=folder / "latents")
    with Dataloader(loader(), data, end_at=("epoch", 1)) as dataloader:
        for batch in dataloader:
            with refuses(ValueError, "batch.cache needs the arrays ['z']. Got ['x', 'label']."):
                batch.cache(batch.arrays)
            with refuses(ValueError, "arrays['z']: shape (2,), float32 declared, shape (2,), int32 here"):
                batch.cache({"z": batch.arrays["label"]})
            with refuses(ValueError, "additional lists of 2 values, one per item. Got {'n': 1}."):
                batch.cache({"z": jnp.zeros(2)}, {"n": [1]})
            batch.cache({"z": jnp.zeros(2)}, persist=batch.group_index == 0)
            with refuses(RuntimeError, "batch.cache was called already"):
                batch.cache({"z": jnp.zeros(2)})
    (file,) = (folder / "latents" / "computed").glob("*.msb")
    file.unlink()
    with refuses(FileNotFoundError, "DataGroup: batch 0 was stored", "is there no more, or is damaged"):
        batches(data)


# Placement, waiting, bars


def test_batches_can_be_placed_by_a_function():
    seen, data = [], group(range(6), 2)

    def place(arrays, layouts, additional, data):
        seen.append((type(arrays["x"]), arrays["x"].dtype, list(layouts), dict(additional), data))
        if len(seen) == 1:
            return {name: jnp.asarray(arrays[name], layout.jax_dtype) for name, layout in layouts.items()}
        return None if len(seen) == 2 else {name: jnp.asarray(array) for name, array in arrays.items()}

    with Dataloader(loader(), data, placement_func=place) as dataloader:
        batch = next(dataloader)
        with refuses(ValueError, "placement_func needs the arrays ['x', 'label']. Got None (NoneType)."):
            next(dataloader)
        with refuses(ValueError, "placement_func needs arrays as they are declared", "uint8 here"):
            next(dataloader)
    assert batch.arrays["x"].dtype == jnp.float32 and numbers(batch) == [0, 1]
    kind, dtype, names, additional, given_group = seen[0]
    assert (kind, dtype, names, given_group) == (np.ndarray, np.uint8, ["x", "label"], data)
    assert additional["number"] == [None, 1]


def test_waiting_is_counted_from_the_second_batch_on():
    def make():
        return lambda number, arrays, seed: time.sleep(0.05)

    with Dataloader(make(), group(range(8), 2), depth=1) as dataloader:
        next(dataloader)
        assert dataloader.idle_usec() == 0
        next(dataloader)
        assert dataloader.idle_usec() >= 90_000
        assert dataloader.idle_usec() == 0


def test_bars_begin_at_start_at_and_tell_of_batches_left_out(capsys):
    shown = io.StringIO()
    data = group(range(8), 2)
    dataloader = Dataloader(failing(3), data, validation=("epoch", 1, data), start_at=(0, 1), end_at=("epoch", 2))
    with pytest.warns(RuntimeWarning):
        found = list(tbatches(dataloader, 3, "learn", file=shown, mininterval=0, miniters=1))
    assert kinds(found) == "tt" + "vvv" + "ttt" + "vvv"
    bars = shown.getvalue()
    assert re.search(r"learn: +12%.*1/8", bars) and re.search(r"learn: 100%.*8/8", bars)
    assert re.search(r"validation: .*4/4", bars)
    assert "1 batches were left out (25.0%), as their loader raised" in capsys.readouterr().out


# Rows of frames


FRAME = pandas.DataFrame(
    {"path": list("abcdef"), "label": range(6), "weight": np.linspace(0, 1, 6)}, index=range(10, 16)
)


def test_rows_are_counted_from_zero_and_slices_are_rows_again():
    rows = RowData(FRAME)
    assert len(rows) == 6 and rows.dataframe is FRAME
    assert [row["path"] for row in rows] == list("abcdef")
    assert rows[np.int64(2)].label == 2 and rows[-1].path == "f"
    assert isinstance(rows[4:], RowData) and rows[4:][0].path == "e" and len(rows[4:]) == 2
    with pytest.raises(IndexError):
        rows[6]
    with refuses(TypeError, "RowData needs a pandas DataFrame. Got"):
        RowData(FRAME["path"])  # pyright: ignore[reportArgumentType]
    with refuses(TypeError, "DataGroup needs the rows of a frame", "Write RowData(frame)"):
        DataGroup(2, FRAME, loader_arrays=ARRAYS)


def test_numbers_of_a_part_of_a_frame_are_shared_and_not_pickled():
    frame = pandas.DataFrame(np.random.default_rng(0).random((10_000, 4)), columns=list("abcd"))
    buffers = []
    pickled = pickle.dumps(RowData(frame)[1000:], 5, buffer_callback=buffers.append)
    assert len(pickled) < 4000 and sum(len(buffer.raw()) for buffer in buffers) >= 9000 * 4 * 8
    again = pickle.loads(pickled, buffers=buffers)
    pandas.testing.assert_frame_equal(again.dataframe, frame.iloc[1000:])


def test_rows_of_a_frame_are_data_of_a_group():
    def make():
        def load(row, arrays, seed):
            arrays["label"][...] = row["label"]
            return {"path": row["path"]}

        return load

    found, _ = batches(group(RowData(FRAME)[2:], 2), function=make())
    assert [batch.arrays["label"].tolist() for batch in found] == [[2, 3], [4, 5]]
    assert [batch.additional["path"] for batch in found] == [["c", "d"], ["e", "f"]]
    assert [row.path for row in found[1].data] == ["e", "f"]


# Images


def test_white_is_white_in_oklab_and_alpha_stays_as_it_is():
    white = np.ones((2, 1, 1, 4))
    white[..., 3] = 0.25
    for to_oklab, back, moved in (
        (image.convert_srgb_to_oklab_frac_hwc, image.convert_oklab_to_srgb_frac_hwc, white.copy()),
        (image.convert_srgb_to_oklab_frac_chw, image.convert_oklab_to_srgb_frac_chw, np.moveaxis(white, -1, -3).copy()),
    ):
        before = moved.copy()
        to_oklab(moved)
        color = moved[0, 0, 0] if moved.shape == white.shape else moved[0, :, 0, 0]
        np.testing.assert_allclose(color, [1, 0, 0, 0.25], atol=1e-6)
        back(moved)
        np.testing.assert_allclose(moved, before, atol=1e-6)


def test_pixels_are_written_with_coefficients_and_come_back():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4) * 10
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = np.concatenate([(pixels[..., :3] / 255 - mean) / std, pixels[..., 3:] / 255], axis=-1)
    last, first = np.empty((2, 3, 4), np.float32), np.empty((4, 2, 3), np.float32)
    image.write_hwc(pixels, last, image.Coefs.IMAGENET_SRGB_ALPHA)
    image.write_chw(pixels, first, image.Coefs.IMAGENET_SRGB_ALPHA)
    np.testing.assert_allclose(last, expected, atol=1e-5)
    np.testing.assert_array_equal(np.moveaxis(first, 0, -1), last)
    before = last.copy()
    again = image.from_srgb_hwc(last, image.Coefs.IMAGENET_SRGB_ALPHA)
    assert again.mode == "RGBA" and (np.asarray(again) == pixels).all()
    np.testing.assert_array_equal(last, before)
    image.write_hwc(pixels[..., :3], last[..., :3], image.Coefs.balanced(2.0))
    np.testing.assert_allclose(last[..., :3], pixels[..., :3] / 63.75 - 2, atol=1e-5)
    balanced = last[..., :3].copy()
    image.convert_balanced_to_frac_hwc(balanced, 2.0)
    np.testing.assert_allclose(balanced, pixels[..., :3] / 255, atol=1e-6)
    image.convert_frac_to_balanced_hwc(balanced, 2.0)
    np.testing.assert_allclose(balanced, last[..., :3], atol=1e-6)
    assert image.Coefs.balanced(alpha=True)[np.float64].tolist() == [[127.5] * 3 + [255.0], [1.0] * 3 + [0.0]]
    with refuses(ValueError, "Coefs needs (divide, subtract), each a number or one per channel. Got 3 (int)."):
        image.Coefs(3)
    for wrong in ("x", ((1, 2), (1,))):
        with refuses(ValueError, "Coefs needs (divide, subtract), each a number or one per channel. Got"):
            image.Coefs(wrong)
    for wrong in ((0.0, 1.0), ([255, 255, 255, 0], [0, 0, 0, 0]), (np.inf, 0)):
        with refuses(ValueError, "Coefs needs finite numbers, and none that is 0 to divide by"):
            image.Coefs(wrong)
    with refuses(ValueError, "Coefs.balanced needs a scale other than 0"):
        image.Coefs.balanced(0)


def test_files_are_opened_as_srgb_up_to_a_number_of_pixels(tmp_path, monkeypatch):
    path = tmp_path / "gray.png"
    Image.new("L", (30, 20), 128).save(path)
    opened = image.open_srgb(path, convert=image.CONVERT_PERCEPTUAL)
    assert (opened.mode, opened.size, opened.getpixel((3, 3))) == ("RGB", (30, 20), (128, 128, 128))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    image.set_max_image_pixels(500)
    with refuses(ValueError, "gray.png cannot be read as an image", "600 pixels"):
        image.open_srgb(path)
    image.set_max_image_pixels(None)
    assert image.open_srgb(path, mode="RGBA").mode == "RGBA"


# What is refused


def test_a_with_block_is_required_once():
    dataloader = Dataloader(loader(), group(), end_at=("epoch", 1))
    with refuses(RuntimeError, "Dataloader needs a `with` block around its loop"):
        iter(dataloader)
    with refuses(RuntimeError, "Dataloader needs a `with` block"):
        next(dataloader)
    with dataloader:
        with refuses(RuntimeError, "in one `with` block, once"):
            dataloader.__enter__()
        assert len(list(dataloader)) == 2
    with refuses(RuntimeError, "in one `with` block, once. Make another one, with start_at."), dataloader:
        pass
    with refuses(RuntimeError, "Dataloader needs a `with` block"):
        next(dataloader)


def test_groups_refuse_what_they_cannot_use():
    with refuses(ValueError, "DataGroup needs batch_size to be an int of at least 1. Got 0 (int)."):
        group(batch_size=0)
    with refuses(ValueError, "DataGroup needs at least one item. Got list of length 0."):
        group([])
    with refuses(TypeError, "DataGroup needs data with a length and [index], or an iterable. Got 3 (int)."):
        group(3)
    with refuses(ValueError, "DataGroup needs shuffle_later 'default', 'repeat'", "Got 'always' (str)."):
        group(shuffle_later="always")
    with refuses(TypeError, "DataGroup needs shuffle_first to be a bool. Got 1 (int)."):
        group(shuffle_first=1)
    with refuses(ValueError, "DataGroup needs loader_arrays", "cache_arrays and a cache_location"):
        group(loader_arrays=None)
    with refuses(ValueError, "DataGroup needs a cache_location for its cache_arrays."):
        group(cache_arrays=LATENTS)
    for bad in (((3,), np.uint8), ((3,), np.uint8, None), (3, np.uint8, np.uint8), ((-1,), np.uint8, np.uint8)):
        with refuses(TypeError, "DataGroup needs loader_arrays['x'] to be (shape, numpy dtype, jax dtype)"):
            group(loader_arrays={"x": bad})
    with refuses(TypeError, "DataGroup needs loader_arrays by name, at least one. Got {} (dict)."):
        group(loader_arrays={})


def test_loaders_refuse_what_they_cannot_use(folder):
    data = group()
    with refuses(TypeError, "Dataloader needs loader_func to be a function. Got None (NoneType)."):
        Dataloader(None, data)  # pyright: ignore[reportArgumentType]
    with refuses(TypeError, "Dataloader needs training to be a DataGroup, or several. Got [1, 2] (list)."):
        Dataloader(loader(), [1, 2])  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, 'validation=("epoch", n, groups) or ("batch", n, groups). Got'):
        Dataloader(loader(), data, validation=("epoch", data))  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, 'validation to begin with "epoch" or "batch", n. Got', "'step'"):
        Dataloader(loader(), data, validation=("step", 1, data))
    with refuses(ValueError, "the batch of start_at to be an int of at least 0. Got -1 (int)"):
        Dataloader(loader(), data, start_at=(0, -1))
    with refuses(ValueError, 'end_at to begin with "epoch" or "batch", n. Got', "'step'"):
        Dataloader(loader(), data, end_at=("step", 1))
    with refuses(ValueError, 'end_at to begin with "epoch" or "batch", n. Got 5 (int).'):
        Dataloader(loader(), data, end_at=5)  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "Dataloader needs start_at=(epoch, further batches). Got 3 (int)."):
        Dataloader(loader(), data, start_at=3)  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "Dataloader needs depth to be an int of at least 1. Got 0 (int)."):
        Dataloader(loader(), data, depth=0)
    with refuses(ValueError, "loader_count of at least 1, unless no DataGroup has loader_arrays"):
        Dataloader(loader(), data, loader_count=0)
    computing = group(cache_arrays=LATENTS, cache_location=folder)
    with refuses(ValueError, "cacher_count of at least 1, unless all caches are read-only"):
        Dataloader(loader(), computing, cacher_count=0)
    only = DataGroup(2, range(4), cache_arrays=LATENTS, cache_location=folder / "empty")
    with refuses(FileNotFoundError, "needs every batch in its cache, and", "has none. Fill one first"):
        Dataloader(loader(), only, loader_count=0)


# What the main API has for this


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_loaders_in_sequence_have_given_all_that_came_before(lengths):
    turns, given_so_far = SequentialOrder(lengths), [0] * len(lengths)
    expected = [number for number, length in enumerate(lengths) for _ in range(length)]
    for step in range(2 * turns.period + 1):
        assert turns.before(step) == given_so_far
        assert turns.at(step) == expected[step % turns.period]
        given_so_far[turns.at(step)] += 1


def test_a_mix_in_sequence_is_another_mix_and_goes_on_from_every_step(key):
    def of(first, samples):
        source = ms.ArraySampleSource({"x": first + np.arange(samples, dtype=np.int32)}, ordering="sequential")
        return ms.DataLoader([source, ms.BatchTransform(2)])

    loaders = {"a": of(0, 4), "b": of(100, 6)}
    mix = ms.loader.MixedLoader(loaders, interleave=False)
    whole = [batch["x"].tolist() for batch, _ in mix.iterate(mix.init_state(key), steps=10)]
    assert [first for first, _ in whole] == 2 * [0, 2, 100, 102, 104]
    for step in range(10):
        rest = mix.iterate(mix.init_state(key, step), steps=10 - step)
        assert [batch["x"].tolist() for batch, _ in rest] == whole[step:]
    with refuses(ValueError, "mix: 2 of 'a', then 3 of 'b' in the state, 2 of 'a', 3 of 'b' here"):
        ms.loader.MixedLoader(loaders).iterate(mix.init_state(key))
    with refuses(ValueError, "weights only for loaders that are interleaved"):
        ms.loader.MixedLoader(loaders, weights={"a": 1, "b": 1}, interleave=False)
    with refuses(TypeError, "MixedLoader needs interleave to be a bool. Got 1 (int)."):
        ms.loader.MixedLoader(loaders, interleave=1)  # pyright: ignore[reportArgumentType]


def test_info_knows_the_place_of_a_batch_and_what_failed():
    def read(index):
        if index == 3:
            raise OSError("no such file")
        return {"x": np.int32(index)}

    source = ms.DiskSampleSource(6, read, ordering=ms.Shuffle("batchwise"))
    loader = ms.DataLoader([source, ms.BatchTransform(2)], executor=ms.Threads(1), on_error="skip item")
    places: dict[tuple[int, int], list[int]] = {}
    state = loader.init_state(jax.random.key(0))
    for _, mask, info in loader.iterate(state, steps=9, with_info=True):
        indices = info.indices.tolist()
        assert places.setdefault(info.place, indices) == indices
        assert list(info.failed) == [row for row, index in enumerate(indices) if index == 3]
        assert [not good for good in mask.tolist()] == [index == 3 for index in indices]
        assert all(isinstance(error, OSError) for error in info.failed.values())
    assert sorted(places) == [(0, 0), (0, 1), (0, 2)]
