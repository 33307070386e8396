"""Damaged and forged checkpoints, loaded and resumed.

`python -m soak.checkpoint_damage COUNT SEED`, in `tests`, prints what went wrong.

Each trial changes the newest of two checkpoints of a run: bits, cuts, deletions, swaps, links, pipes, folders in the
place of files, and JSON that is changed and sealed again. Then the run is restored. What comes has to be the newest
checkpoint as it was saved, or the one before it, with a warning that names the newest. With the newest alone, what
comes has to be an error that names it.
"""

import collections
import hashlib
import json
import os
import pathlib
import random
import shutil
import sys
import tempfile
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import millstream as ms
from millstream.checkpoints import CheckpointStore
from millstream.checkpoints.manifest import NAME, read_manifest, take_stock
from millstream.errors import DamagedCheckpoint

PATIENCE = 60.0
NAMES = ("0000000001", "0000000002")


def state_at(step):
    return {"w": jnp.full(300, step, jnp.float32), "n": np.int64(step), "key": jax.random.key(step)}


def write_run(folder):
    """Two checkpoints of a run, with all that a checkpoint can have."""
    checkpoint = ms.checkpoint(folder)
    history = ms.loops.history()
    loader = ms.DataLoader([ms.ArraySampleSource(np.arange(8)), ms.BatchTransform(2)])
    for step in (1, 2):
        elapsed = ms.loops.Elapsed(steps=step)
        history.commit(elapsed, {"loss": 1 / step, "word": "a"})
        checkpoint(elapsed, state_at(step), data_state=loader.init_state(jax.random.key(3), step=step), history=history)
    checkpoint.close()


def is_right(saved, step, history=True):
    left, right = jax.tree.map(_raw, (saved.state, state_at(step)))
    same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))
    losses = [1 / number for number in range(1, step + 1)]
    return same and saved.elapsed.steps == step and (not history or saved.history.collect("loss") == losses)


def _raw(leaf):
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


# Damage: each changes a checkpoint, at a path in its folder unless it has a place of its own


def flip(chance, folder, path):
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def cut(chance, folder, path):
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


def delete(chance, folder, path):
    path.unlink()


def swap(chance, folder, path):
    content = path.read_bytes()
    others = [other for other in sorted(folder.parent.rglob("*")) if other.is_file() and other.read_bytes() != content]
    path.write_bytes(chance.choice(others).read_bytes())


def link(chance, folder, path):
    target = folder.parent.parent / "elsewhere"
    path.replace(target)
    path.symlink_to(target if chance.random() < 0.5 else "nowhere")


def pipe(chance, folder, path):
    path.unlink()
    os.mkfifo(path)


def to_folder(chance, folder, path):
    path.unlink()
    path.mkdir()


def extra(chance, folder, path):
    what = path.with_name("extra")
    chance.choice([what.touch, lambda: os.mkfifo(what), lambda: what.symlink_to("/etc/passwd")])()


def linked_folder(chance, folder, path):
    target = folder.parent.parent / "elsewhere"
    inner = chance.choice([folder, folder / "state", folder / "files"])
    inner.rename(target)
    inner.symlink_to(target)


def forge(chance, folder, path):
    """Change what JSON says, and seal the checkpoint again."""
    path = chance.choice([path for path in sorted(folder.rglob("*.json")) if path.name != NAME] + [folder / NAME])
    text = path.read_text()
    if path.name == NAME:
        facts = json.loads(text)
        del facts["sha256"]
        seal(path, _mutated(chance, facts))
        return
    if chance.random() < 0.1:
        text = chance.choice(["", "{}", "[]", "null", "[" * 200_000, "1" * 5000, '{"a": 1', "\0", '"\\ud800"'])
    else:
        text = json.dumps(_mutated(chance, json.loads(text)))
    path.write_text(text)
    reseal(folder)


def forge_history(chance, folder, path):
    path = chance.choice(sorted((folder / "files").iterdir()))
    flip(chance, folder, path)
    reseal(folder)


def forge_bytes(chance, folder, path):
    path = folder / "state" / "0.bin"
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])
    reseal(folder)


def reseal(folder):
    """Write the manifest that belongs to what is there."""
    found = read_manifest(folder)
    (folder / NAME).unlink()
    (folder / NAME).write_bytes(take_stock(folder, found.step, found.metrics).encode())


def seal(path, facts):
    """Write a manifest that says anything at all, with the seal that belongs to it."""
    body = json.dumps(facts, indent=1)
    body = (body.removesuffix("\n}") + ",\n").encode() if body.endswith("\n}") else body.encode()
    path.write_bytes(body + f' "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode())


def _mutated(chance, value):
    """JSON with one thing changed: another value, something missing, or something more."""
    places = list(_places(value))
    if not places:
        return chance.choice(_VALUES)
    holder, key = chance.choice(places)
    kind = chance.choice(["value", "value", "remove", "add", "nest"])
    if kind == "value":
        holder[key] = chance.choice(_VALUES)
    elif kind == "remove":
        del holder[key]
    elif kind == "nest":
        holder[key] = [holder[key]] if chance.random() < 0.5 else {"$tuple": holder[key]}
    elif isinstance(holder, list):
        holder.insert(key, chance.choice(_VALUES))
    else:
        holder[chance.choice(["more", "$array", "$plain", "$dict", "shape"])] = chance.choice(_VALUES)
    return value


_VALUES = [
    None,
    True,
    -1,
    0,
    3,
    2**40,
    10**30,
    0.5,
    "",
    "a",
    "int4",
    "object",
    "../../x",
    [],
    {},
    [[]],
    [0, 0],
    "é" * 99,
]


def _places(value):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


DAMAGE = (flip, cut, delete, swap, link, pipe, to_folder, extra, linked_folder, forge_bytes, forge_history)


def restored(run, alone, history):
    """What restoring comes to: the step, an error of ours, or what is wrong, in words."""
    found = []

    def restore():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                saved = ms.restore(run, state_at(0))
            except BaseException as error:
                found.append(error)
                return
            found.append((saved, [str(warning.message) for warning in caught]))

    thread = threading.Thread(target=restore, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if not found:
        return "hang", "it hangs"
    (outcome,) = found
    if isinstance(outcome, BaseException):
        # A tree that differs from the state's can be the state's fault as well, and is refused side by side.
        ours = isinstance(outcome, DamagedCheckpoint) or (
            isinstance(outcome, ValueError) and "needs a tree like the one checkpoint 2" in str(outcome)
        )
        named = str(run) in str(outcome) and "heckpoint 2" in str(outcome)
        return ("named", "") if ours and named else ("raw", f"{type(outcome).__name__}: {outcome}")
    saved, told = outcome
    if not is_right(saved, saved.step, history):
        return "wrong", f"step {saved.step} has wrong values"
    if saved.step == 1 and not alone:
        fell_back = len(told) == 1 and "Checkpoint 2 in" in told[0] and "Checkpoint 1 is used instead." in told[0]
        return ("fell back", "") if fell_back else ("raw", f"fell back and said {told}")
    return "loaded", ""


def trial(original, run, chance, kind):
    """Damage a copy of a run, and restore it with and without the checkpoint before."""
    shutil.copytree(original, run)
    folder = run / NAMES[1]
    path = chance.choice([path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size])
    kind(chance, folder, path)
    what = f"{kind.__name__} {path.relative_to(folder)}"
    outcomes = []
    for alone in (False, True):
        if alone:
            shutil.rmtree(run / NAMES[0])
        came, words = restored(run, alone, history=kind is not forge_history)  # which then says something else
        if came == "loaded" and kind not in (forge, forge_history):
            came, words = "wrong", "damage was not found"
        outcomes.append((came, f"{what}, {'alone' if alone else 'beside an older one'}: {words}"))
    return outcomes


def trials(count, seed):
    """How often what came, and in words what should not have come."""
    chance, counts, failures = random.Random(seed), collections.Counter(), []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as base:
        original = pathlib.Path(base, "original")
        write_run(original)
        assert is_right(ms.restore(original, state_at(0)), 2)
        for number in range(count):
            # Every other one is forged: that is where there are most ways.
            kind = forge if number % 2 else DAMAGE[number // 2 % len(DAMAGE)]
            run = pathlib.Path(base, str(number), "run")
            for came, words in trial(original, run, random.Random(chance.random()), kind):
                counts[came] += 1
                if came in ("hang", "raw", "wrong"):
                    failures.append(f"{seed}, {number}: {came}: {words}")
            with CheckpointStore(original, read_only=True) as store:
                assert store.steps() == [1, 2]
    return dict(counts), failures


if __name__ == "__main__":
    begun = time.monotonic()
    told, wrong = trials(int(sys.argv[1]), int(sys.argv[2]))
    print("\n".join(wrong))
    print(told, f"{time.monotonic() - begun:.0f} s")
    sys.exit(bool(wrong))
