"""The history in checkpoints: a save writes the rows since an earlier one, and every checkpoint is whole."""

import contextlib
import errno
import os
import shutil
import threading
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import folder_in_memory
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.checkpoints import CheckpointStore
from millstream.checkpoints.folders import step_name
from millstream.errors import DamagedCheckpoint


@pytest.fixture
def folder():
    with folder_in_memory() as folder:
        yield folder / "run"


class Run:
    """A run by hand, whose rows are known from their steps."""

    def __init__(self, folder, history=None, steps=0, **options):
        self.folder, self.steps = folder, steps
        self.history = ms.loops.history() if history is None else history
        self.checkpoint = ms.checkpoint(folder, **options)

    def log(self, rows, word="a"):
        for _ in range(rows):
            self.steps += 1
            row = {"loss": 1 / self.steps, "batch": self.steps % 7}
            row |= {"word": f"{word} {self.steps}"} if self.steps % 3 == 0 else {}
            self.history.commit(ms.loops.Elapsed(self.steps, 4 * self.steps, time=float(self.steps)), row)
        return self

    def save(self, loss=0.0):
        elapsed, state = ms.loops.Elapsed(self.steps, 4 * self.steps), {"step": np.int64(self.steps)}
        metrics = {} if self.checkpoint._keep.monitor is None else {"loss": loss}
        self.checkpoint(elapsed, state, history=self.history, metrics=metrics)
        self.checkpoint.wait()
        return self

    def rows(self):
        return table(self.history)


def table(history):
    return [dict(row) for row in history]


def restored(folder, step=None):
    saved = ms.restore(folder, {"step": np.int64(0)}, step=step)
    assert int(saved.state["step"]) == saved.step
    return saved


def parts(folder, step):
    return sorted((folder / step_name(step) / "files").iterdir())


def written(folder, step):
    """The bytes of the history of a checkpoint that no other checkpoint has."""
    return sum(path.stat().st_size for path in parts(folder, step) if path.stat().st_nlink == 1)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)  # the same file, whatever names it has


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 1, 2, 5, 30, 200]), min_size=1, max_size=40), st.sampled_from([1, 2, 3, None]))
def test_every_checkpoint_has_the_rows_up_to_its_own(rows, keep):
    with folder_in_memory() as base:
        run, expected = Run(base / "run", keep=keep), {}
        run.log(1)
        for count in rows:
            run.log(count).save()
            expected[run.steps] = run.rows()
            run.history.commit(ms.loops.Elapsed(run.steps, 4 * run.steps), {"late": count})  # the newest row may change
        run.checkpoint.close()
        with CheckpointStore(run.folder, read_only=True) as store:
            steps = store.steps()
        assert len(steps) == min(len(expected), 10**9 if keep is None else keep)
        for step in steps:
            found = restored(run.folder, step).history
            assert table(found) == expected[step]


def test_a_save_writes_what_is_new_and_not_what_there_is(folder):
    run = Run(folder).log(20_000)
    for _ in range(6):
        run.log(50).save()
    assert written(folder, 20_300) < 20_000 < sum(path.stat().st_size for path in parts(folder, 20_300)) / 20
    assert table(restored(folder).history) == run.rows()


def test_many_saves_leave_few_parts_and_write_each_row_a_few_times(folder):
    run, total = Run(folder, keep=3), 0
    for _ in range(200):
        run.log(1).save()
        total += written(folder, run.steps)
    assert len(parts(folder, 200)) <= 3 * 7 + 1
    assert len({path.stat().st_ino for step in (199, 200) for path in parts(folder, step)}) == sum(
        len(parts(folder, step)) for step in (199, 200)
    )
    whole = 200 * sum(path.stat().st_size for path in parts(folder, 200)) / 2
    assert total < whole / 4, (total, whole)
    assert table(restored(folder).history) == run.rows()


@pytest.mark.parametrize("options", [{"keep": 1}, {"keep": 1, "best": 1, "monitor": "loss"}, {"keep": 2}])
def test_parts_live_as_long_as_a_checkpoint_has_them(folder, options):
    run, expected = Run(folder, **options), {}
    for loss in (5.0, 1.0, 4.0, 3.0, 2.0, 6.0, 7.0):
        run.log(100).save(loss)
        expected[run.steps] = run.rows()
    kept = [200, 700] if "best" in options else [600, 700][-options["keep"] :]
    with CheckpointStore(folder, read_only=True) as store:
        assert store.steps() == kept
    for step in kept:
        assert table(restored(folder, step).history) == expected[step]
    run.checkpoint.close()
    assert sorted(os.listdir(folder)) == [step_name(step) for step in kept]


def test_a_run_that_branches_from_an_older_checkpoint_has_nothing_of_the_future_it_left(folder):
    first = Run(folder, keep=None)
    for _ in range(5):
        first.log(50, "first").save()
    first.checkpoint.close()
    for _ in range(2):  # also from where an earlier branch began
        saved = restored(folder, 150)
        assert table(saved.history) == first.rows()[:150]
        second = Run(folder, saved.history, 150, keep=None)
        for _ in range(4):
            second.log(30, "second").save()
            assert table(restored(folder).history) == second.rows()
        second.checkpoint.close()
        words = restored(folder).history.collect("word")
        assert words[49:51] == ["first 150", "second 153"]


def test_a_history_that_went_on_elsewhere_shares_nothing_with_a_branch_of_it(folder):
    first = Run(folder, keep=None)
    for _ in range(4):
        first.log(50, "first").save()
    first.checkpoint.close()
    branch = Run(folder, restored(folder, 100).history, 100, keep=None).log(100, "branch").save()
    branch.checkpoint.close()
    first.checkpoint(ms.loops.Elapsed(201), {"step": np.int64(201)}, history=first.log(1, "first").history)
    first.checkpoint.close()
    assert table(restored(folder).history) == first.rows()


def test_any_part_that_is_damaged_or_missing_is_named_and_the_checkpoint_before_it_used(folder):
    run, expected = Run(folder, keep=3), {}
    for _ in range(12):
        run.log(40).save()
        expected[run.steps] = run.rows()
    run.checkpoint.close()
    assert len(parts(folder, 480)) >= 3
    for number in range(len(parts(folder, 480))):
        for harm in (flip, os.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])):
            shutil.copytree(folder, folder.parent / "whole", copy_function=os.link)
            copies = {path: path.read_bytes() for path in parts(folder, 480)}
            path = parts(folder, 480)[number]
            harm(path)
            with pytest.warns(RuntimeWarning, match=rf"Checkpoint 480 in .*\n.*files/{path.name}: ") as caught:
                saved = restored(folder)
            assert (saved.step, len(caught)) == (440, 1) and table(saved.history) == expected[440]
            with pytest.raises(DamagedCheckpoint, match=f"files/{path.name}: "):
                restored(folder, 480)
            for path, content in copies.items():
                path.write_bytes(content)
            shutil.rmtree(folder.parent / "whole")
    assert table(restored(folder).history) == expected[480]


def test_a_part_that_is_gone_or_cut_is_written_again_by_the_next_save(folder):
    run = Run(folder, keep=2)
    for _ in range(4):
        run.log(40).save()
    os.unlink(parts(folder, 120)[0])
    path = parts(folder, 160)[0]
    path.write_bytes(path.read_bytes()[:-1])
    run.log(40).save()
    assert table(restored(folder).history) == run.rows()


def test_without_hard_links_parts_are_copied(folder, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    run = Run(folder)
    for _ in range(5):
        run.log(40).save()
    assert all(path.stat().st_nlink == 1 for path in parts(folder, 200))
    assert table(restored(folder).history) == run.rows()


def test_a_save_that_failed_is_not_built_upon(folder):
    run = Run(folder, keep=2)
    for number in range(8):
        run.log(40)
        if number % 3 == 2:
            (folder / f".tmp-{run.steps}").write_bytes(b"in the way")
            with pytest.raises(OSError, match="File exists"):
                run.save()
        else:
            run.save()
            assert table(restored(folder).history) == run.rows()


def test_two_directories_have_one_history_each_whole(folder):
    run = Run(folder)
    other = ms.checkpoint(folder.parent / "other", keep=1)
    for number in range(6):
        run.log(40).save()
        if number % 2:
            other(ms.loops.Elapsed(run.steps), {"step": np.int64(run.steps)}, history=run.history)
    other.close()
    assert table(restored(folder).history) == table(restored(folder.parent / "other").history) == run.rows()


def test_a_reader_beside_a_run_gets_whole_histories(folder):
    run, stop = Run(folder, keep=1).log(1).save(), threading.Event()

    def write():
        with contextlib.suppress(StopIteration):
            while not stop.is_set():
                run.log(20).save()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(30):
                saved = restored(folder)
                assert saved.history.collect("steps") == list(range(1, saved.step + 1))
    finally:
        stop.set()
        writer.join()
    run.checkpoint.close()


def test_outputs_and_matrices_are_left_out_and_the_others_stay(folder):
    run = Run(folder)
    for value in (1.0, 2.0, jnp.ones((3, 1)), 4.0, jnp.ones((2, 2))):
        run.log(1)
        run.history.commit(ms.loops.Elapsed(run.steps, 4 * run.steps), {"x": value, "outputs": {"y": np.ones(2)}})
        run.save()
    found = restored(folder).history
    assert found.collect("steps", "x") == ([1, 2, 4], [1.0, 2.0, 4.0]) and "outputs.y" not in found.names()


def test_metrics_that_are_vectors_are_kept(folder):
    run = Run(folder)
    for number in range(3):
        run.log(1)
        run.history.commit(ms.loops.Elapsed(run.steps, 4 * run.steps), {"per_class": jnp.arange(3) + number})
        run.save()
    np.testing.assert_array_equal(restored(folder).history.collect("per_class"), [[0, 1, 2], [1, 2, 3], [2, 3, 4]])


def test_a_checkpoint_of_an_earlier_format_is_refused_with_what_to_do(folder, monkeypatch):
    from millstream.loops import saved_run

    with monkeypatch.context() as patched:
        patched.setattr(saved_run, "_FORMAT", 1)
        Run(folder).log(1).save().checkpoint.close()
    with pytest.raises(DamagedCheckpoint, match=r"has format 1, and this version reads format 3: load it with the ver"):
        restored(folder)
