"""Trials of checkpoint stores that need processes of their own. Run by test_checkpoint_store.py; tells lines of JSON.

`python checkpoint_store_script.py killed FOLDER COUNT SEED` and the like can be run with any count and seed.
"""

import errno
import json
import os
import pathlib
import random
import resource
import select
import signal
import sys
import time
import warnings

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from millstream.checkpoints import CheckpointStore, Retention
from millstream.errors import DamagedCheckpoint, StorageFailed


def tell(**facts):
    print(json.dumps(facts), flush=True)


def tree_at(step, size=60_000):
    """A tree whose every value says its step, in arrays that do not compress to nothing."""
    noise = np.random.default_rng(step).normal(size=size).astype(np.float32)
    key = jax.random.wrap_key_data(
        jax.numpy.asarray(np.array([0, step], np.uint32))
    )  # like jax.random.key, but compiles nothing
    return {"noise": jax.numpy.asarray(noise), "step": step, "small": np.full(10, step), "key": key}


def same(tree, step, size=60_000):
    expected = tree_at(step, size)
    return all(
        np.array_equal(jax.random.key_data(left), jax.random.key_data(right))
        if name == "key"
        else np.array_equal(left, right)
        for name, (left, right) in {name: (tree[name], expected[name]) for name in expected}.items()
    )


def forked(function, *arguments):
    """Run a function in a child, with threads and devices of its own; what it returns, and its status."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        code = 1
        try:
            os.write(writer, json.dumps(function(*arguments)).encode())
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return (json.loads(said) if said else None), os.waitstatus_to_exitcode(status)


class Operations:
    """Does something at the n-th operation on the files below a folder that writes."""

    def __init__(self, folder):
        self.folder, self.count = str(folder), 0
        self.at, self.action = (), None
        sys.addaudithook(self.hook)

    def start(self, at, action):
        self.at, self.action = at, action

    def stop(self):
        self.action = None

    def hook(self, event, arguments):
        if self.action is None or event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            return
        below = isinstance(arguments[0], str | os.PathLike) and str(arguments[0]).startswith(self.folder)
        if not below and event not in ("os.remove", "os.rmdir"):  # these are relative to a folder that is open
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        self.count += 1
        if self.count in self.at:
            self.action(event)


# Killed


def write_until_killed(folder, announce, kill_at):
    operations = Operations(folder)
    store = CheckpointStore(folder, keep=Retention(latest=1))
    step = store.latest() or 0
    operations.start((kill_at,), lambda event: os.kill(os.getpid(), signal.SIGKILL))
    while True:
        step += 1
        for _ in range(1 + step % 2):  # every other one is replaced, while it is the only one
            store.save(step, tree_at(step), {"step": step})
            store.wait()
            os.write(announce, step.to_bytes(8, "little"))


def what_is_there(folder):
    with CheckpointStore(folder, keep=Retention(latest=1)) as store:
        left = sorted(name for name in os.listdir(folder) if name.startswith(".") and name != ".lock")
        if store.latest() is None:
            return {"step": 0, "same": True, "left": left}
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # damage that is passed over is a failure here
            tree, document, _ = store.load(like=tree_at(0))
        return {"step": document["step"], "same": same(tree, document["step"]), "left": left}


def killed(folder, count, seed):
    """Kill a process that saves, at a random moment or operation, and see what the next one finds."""
    rng, last = random.Random(seed), 0
    for number in range(count):
        kill_at = rng.randrange(1, 90) if number % 2 else 10**9
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            write_until_killed(folder, writer, kill_at)
        os.close(writer)
        if kill_at == 10**9 and select.select([reader], [], [], 60)[0]:  # it has saved one
            time.sleep(rng.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
        with os.fdopen(reader, "rb") as pipe:
            announced = pipe.read()
        os.waitpid(child, 0)
        last = max(last, int.from_bytes(announced[-8:], "little"))
        found, _ = forked(what_is_there, folder)
        ok = found is not None and found["same"] and not found["left"] and last <= found["step"] <= last + 1
        tell(trial=number, seed=seed, kill_at=kill_at, announced=last, found=found, ok=ok)
        last = found["step"] if found else last


# No room


def fail_once(folder, limit, at, lasting):
    """Save one, then one that fails, then another one; what the folder holds in between."""
    operations = Operations(folder)
    store = CheckpointStore(folder, keep=Retention(latest=1))
    store.save(1, tree_at(1), {"step": 1})
    store.wait()

    def refuse(event):
        if event not in ("os.remove", "os.rmdir"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    else:
        operations.start(range(at, 10**9) if lasting else (at,), refuse)
    raised, number = "", None
    try:
        # What cannot be deleted is warned about, and deleted when there is room again.
        warnings.filterwarnings("ignore", message="CheckpointStore could not delete")
        store.save(2, tree_at(2, 90_000), {"step": 2}, {"more": bytes(3000)})
        deadline = time.monotonic() + 60
        while store._saving is not None and not store._saving.is_over and time.monotonic() < deadline:
            time.sleep(0.005)
        store.check()
    except StorageFailed as error:
        raised, number = str(error), error.errno
    operations.stop()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    names, steps = sorted(os.listdir(folder)), store.steps()
    size = {1: 60_000, 2: 90_000}[steps[-1]]
    good = same(store.load(like=tree_at(0, size)).tree, steps[-1], size)
    store.save(3, tree_at(3), {"step": 3})
    store.close()
    after = sorted(os.listdir(folder))
    return {"raised": raised, "errno": number, "names": names, "steps": steps, "good": good, "after": after}


def no_room(folder, count, seed):
    """Let a save fail for want of room at many points."""
    rng = random.Random(seed)
    for number in range(count):
        place = pathlib.Path(folder) / str(number)
        limit = int(10 ** rng.uniform(0, 5.6)) if number % 2 else None
        at, lasting = number // 2 + 1 if count < 60 else rng.randrange(1, 30), bool(number // 2 % 2)
        found, code = forked(fail_once, place, limit, at, lasting)
        if found is None:
            tell(trial=number, ok=False, code=code, limit=limit, at=at)
            continue
        failed, steps = found["raised"] != "", found["steps"]
        ok = found["good"] and found["after"] == ["0000000003"] and (failed or steps[-1] == 2)
        ok = ok and found["names"] == [".lock", *(f"{step:010d}" for step in steps)]  # what is there is whole
        told = f"while the checkpoint of step 2 was saved in {place}: "
        full = found["errno"] in (errno.ENOSPC, errno.EFBIG) and "Make room" in found["raised"]
        ok = ok and (not failed or (told in found["raised"] and full))
        tell(trial=number, seed=seed, limit=limit, at=at, lasting=lasting, failed=failed, ok=ok, found=found)


# Several processes


def global_tree(step, mesh):
    rows = np.arange(64, dtype=np.float32).reshape(8, 8) + step
    over = NamedSharding(mesh, P("data"))
    whole = jax.make_array_from_callback(rows.shape, over, rows.__getitem__)
    everywhere = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P()), rows.__getitem__)
    keys = jax.random.wrap_key_data(
        jax.make_array_from_callback((8, 2), over, (np.arange(16, dtype=np.uint32).reshape(8, 2) + step).__getitem__)
    )
    return {"rows": whole, "same": everywhere, "keys": keys, "own": jax.numpy.full(3, step), "numpy": np.full(2, step)}


def local_values(leaf):
    leaf = jax.random.key_data(leaf) if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    if not isinstance(leaf, jax.Array):
        return [leaf.tolist()]
    return [np.asarray(shard.data).tolist() for shard in leaf.addressable_shards]


def together(folder, address, count, number):
    """One of several processes that save and load together."""
    jax.distributed.initialize(address, count, number, heartbeat_timeout_seconds=10)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    store = CheckpointStore(folder, keep=Retention(latest=3))
    for step in (1, 2):
        store.save(step, global_tree(step, mesh), {"step": step}, {f"of-{number}": bytes([number])})
    store.wait()
    tell(steps=store.steps(), latest=store.latest())
    for case in ("whole", "damaged"):
        if case == "damaged":
            if number == 0:
                victim = next(path for path in (folder / "0000000002" / "state").rglob("*") if path.is_file())
                victim.write_bytes(b"rubbish")
            multihost_utils.sync_global_devices("damaged")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = store.load(like=global_tree(0, mesh))
        expected = global_tree(loaded.step, mesh)
        equal = {name: local_values(loaded.tree[name]) == local_values(expected[name]) for name in expected}
        files = {name: list(content) for name, content in loaded.files.items()}
        spec = str(loaded.tree["rows"].sharding.spec)
        tell(
            case=case,
            step=loaded.step,
            equal=equal,
            document=loaded.document,
            files=files,
            spec=spec,
            warned=len(caught),
        )
    fail_in_one(store, folder, mesh, number)
    for step in (7, 1):
        try:
            store.load(step, like={"other": 1})
        except (FileNotFoundError, RuntimeError, ValueError) as error:
            tell(refused=step, words=f"{type(error).__name__}: {error}")
    store.save(9, global_tree(9, mesh), {"step": 9})
    store.close()
    tell(finished=store.steps(), names=sorted(set(os.listdir(folder)) - {".lock"}))  # which process 0 may still hold


def fail_in_one(store, folder, mesh, number):
    """The last process cannot write its part of a checkpoint."""
    if number:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
    begun = time.monotonic()
    store.save(3, global_tree(3, mesh), {"step": 3}, {f"of-{number}": bytes(100)})
    try:
        store.wait()
        words = ""
    except Exception as error:
        words = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    tell(failed=words, seconds=time.monotonic() - begun, steps=store.steps())


# Many devices, and a clean end


def on_devices(folder):
    """Load what one device has saved onto eight, and save what lies on eight."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    over = NamedSharding(mesh, P("data"))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=over), sharded_tree())
    with CheckpointStore(folder) as store:
        tree = store.load(like=like).tree
        store.save(2, jax.device_put(tree, over), {"devices": len(jax.devices())})
    expected = sharded_tree()
    equal = jax.tree.map(lambda a, b: np.array_equal(raw(a), raw(b)), tree, expected)
    placed = jax.tree.map(lambda leaf: len(leaf.sharding.device_set), tree)
    tell(equal=equal, placed=placed, committed=jax.tree.map(lambda leaf: leaf.committed, tree))


def sharded_tree():
    keys = jax.random.split(jax.random.key(3), 8)
    return {"w": jax.numpy.arange(32.0).reshape(8, 4), "keys": keys, "half": jax.numpy.ones(8, jax.numpy.bfloat16)}


def raw(leaf):
    return np.asarray(jax.random.key_data(leaf) if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def saving_and_leaving(folder, how):
    store = CheckpointStore(folder)
    for step in (1, 2):
        store.save(step, tree_at(step), {"step": step})
    if how == "closed":
        store.close()


def write_many(folder, count):
    """Save again and again, and keep one."""
    with CheckpointStore(folder, keep=Retention(latest=1)) as store:
        for step in range(1, count + 1):
            store.save(step, tree_at(step, 100), {"step": step})


def main():
    what, folder, *rest = sys.argv[1:]
    folder = pathlib.Path(folder)
    warnings.filterwarnings("ignore", message=r".*fork\(\)")  # the parent has no devices yet
    if what in ("killed", "no_room"):
        {"killed": killed, "no_room": no_room}[what](folder, int(rest[0]), int(rest[1]))
    elif what == "together":
        together(folder, rest[0], int(rest[1]), int(rest[2]))
    elif what == "devices":
        on_devices(folder)
    elif what == "write_many":
        write_many(folder, int(rest[0]))
    elif what == "leave":
        saving_and_leaving(folder, rest[0])
    elif what == "hold":
        store = CheckpointStore(folder)
        tell(held=True)
        sys.stdin.read()
        store.close()


if __name__ == "__main__":
    try:
        main()
    except DamagedCheckpoint as error:
        tell(damaged=str(error))
        raise
