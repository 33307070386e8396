"""The dialects cyreal and cereal: every code block of their documents runs and does what the text says."""

import pathlib
import re
from typing import Any

import flax.training.train_state
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_trees_equal, code_blocks, folder_in_memory
from formats import write_idx
from test_bad_input import refuses
from test_files import is_mapped
from test_host import reader_threads

import millstream as ms
from millstream.dialects import cereal, cyreal

pytestmark = pytest.mark.optimized

SEEDS = pathlib.Path(__file__).parent / "seeds"
DOCUMENT = pathlib.Path(__file__).parent.parent / "docs" / "coming-from" / "cyreal.md"
ROWS, BATCH, STEPS = 300, 128, 3


def blocks_of(name):
    """The code blocks of a document."""
    return code_blocks((SEEDS / name).read_text())


def run(block: str, namespace: dict[str, Any], **fills: str) -> dict[str, Any]:
    """Run a code block with its imports from the dialect, and with what stands for each `...` in it.

    Args:
        block: The code.
        namespace: What the block takes as given; what it makes is put there.
        fills: What to write for dots, by the last word of their line.
    """
    exec(prepared(block, **fills), namespace)
    return namespace


def prepared(block, **fills):
    """The code of a block as it is run: nothing but import lines and dots is another."""
    lines, left = [], dict(fills)
    for line in block.splitlines():
        line = re.sub(r"^from (cyreal|cereal|ciclo)\b", r"from millstream.dialects.\1", line)
        line = re.sub(r"^import ciclo$", "from millstream.dialects import ciclo", line)
        lines.append(line.replace("...", left.pop(re.findall(r"\w+", line)[-1]), 1) if "..." in line else line)
    assert not left, f"the block has no line for {left}"
    return "\n".join(lines) + "\n"


def check_what_is_replaced(block, **fills):
    for old, new in zip(block.splitlines(), prepared(block, **fills).splitlines(), strict=True):
        if old == "import ciclo":
            assert new == "from millstream.dialects import ciclo"
        elif re.match("from (cyreal|cereal|ciclo)", old):
            assert new.replace("millstream.dialects.", "", 1) == old
        elif "..." in old:
            assert old in [new.replace(fill, "...", 1) for fill in fills.values()]
        else:
            assert new == old


CYREAL, CEREAL = blocks_of("000_cyreal.md"), blocks_of("001_cereal.md")
FILLS = {CYREAL[0]: {"network": "seen.append((batch, mask))"}, CYREAL[3]: {"RAM": "seen.append((batch, mask))"}}


def test_only_import_lines_and_dots_are_replaced():
    assert len(CYREAL) == 6 and len(CEREAL) == 5
    for block in (*CYREAL, *CEREAL):
        check_what_is_replaced(block, **FILLS.get(block, {}))


@pytest.fixture(scope="module", autouse=True)
def usual_promotion():
    """The documents are written for users, who rarely set strict promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module", autouse=True)
def mnist(usual_promotion):
    """Where data sets are looked for: MNIST with 300 images in files of the real format."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (ROWS, 28, 28), np.uint8), (np.arange(ROWS) % 10).astype(np.uint8)
    images[:, 0, 0], images[:, 0, 1] = np.arange(ROWS) % 256, np.arange(ROWS) // 256  # each says which it is
    with folder_in_memory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        write_idx(folder / "millstream/mnist/train-images-idx3-ubyte.gz", images)
        write_idx(folder / "millstream/mnist/train-labels-idx1-ubyte.gz", labels)
        yield


def numbers(batch, mask):
    """Which images are in a batch."""
    corner = np.asarray(batch["image"][:, 0, :2, 0], np.int32)[np.asarray(mask)]
    return (corner[:, 0] + 256 * corner[:, 1]).tolist()


def tally(model_state, batch, mask):
    """Stands for an update of a model: counts rows, and adds up labels."""
    rows, labels = model_state
    return rows + mask.sum(), labels + (batch["label"] * mask).sum()


NOTHING = (jnp.int32(0), jnp.int32(0))
ALL = (ROWS, sum(number % 10 for number in range(ROWS)))


@pytest.fixture(scope="module")
def quick_start(mnist):
    """What the first block of cyreal makes, with a network that notes what it has seen."""
    return run(CYREAL[0], {"seen": []}, **FILLS[CYREAL[0]])


# cyreal


def test_cyreal_quick_start_shows_every_sample_once(quick_start):
    seen, loader = quick_start["seen"], quick_start["loader"]
    assert len(seen) == loader.steps_per_epoch == STEPS
    assert sorted(number for pair in seen for number in numbers(*pair)) == list(range(ROWS))
    assert [int(mask.sum()) for _, mask in seen] == [128, 128, 44]
    assert {batch["image"].shape for batch, _ in seen} == {(BATCH, 28, 28, 1)}
    assert seen[0][0]["image"].dtype == np.uint8 and seen[0][0]["label"].dtype == np.int32
    assert numbers(*seen[0]) != list(range(BATCH))


def test_cyreal_scan_epoch_goes_through_the_data_in_one_program(quick_start, count_compilations):
    given = {"loader": quick_start["loader"], "update_model": tally, "model_state": NOTHING}
    given["loader_state"] = quick_start["state"]
    run(CYREAL[1], given)
    assert tuple(map(int, given["model_state"])) == ALL
    assert int(given["loader_state"].step) == STEPS
    with count_compilations() as count:
        given["loader"].scan_epoch(given["loader_state"], NOTHING, given["body_fn"])
    assert count == [0]


def test_cyreal_jits_an_entire_epoch():
    given = run(CYREAL[2], {"model_init": lambda: NOTHING, "model_update": tally})
    assert tuple(map(int, given["model_state"])) == ALL
    assert int(given["loader_state"].step) == STEPS


def test_cyreal_streams_the_same_batches_from_disk(quick_start):
    given = run(CYREAL[3], {"seen": []}, **FILLS[CYREAL[3]])
    assert_trees_equal(given["seen"], quick_start["seen"])
    source = given["pipeline"][0]
    assert source.prefetch_size == 1024
    assert is_mapped(source.data["image"])


def test_cyreal_host_callback_logs_each_batch_of_a_compiled_program(capsys):
    loader = run(CYREAL[4], {})["loader"]
    state = loader.init_state(jax.random.PRNGKey(0))
    means = []
    for _ in range(2):
        batch, state, _ = jax.jit(loader.next)(state)
        images, labels = np.asarray(batch["image"], np.float32), np.asarray(batch["label"])
        means.append(np.mean((images.mean((1, 2, 3)) - labels) ** 2))
    assert losses_printed(capsys) == pytest.approx(means, rel=1e-4)


def losses_printed(capsys):
    return [float(line.removeprefix("loss: ")) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(scope="module")
def rollouts(usual_promotion):
    """What the block on reinforcement learning makes."""
    return run(CYREAL[5], {})


def test_cyreal_streams_transitions_of_a_policy(rollouts):
    assert rollouts["loader"].steps_per_epoch == 1  # so "after each epoch" is after each batch
    assert {"state", "action", "reward", "next_state", "done", "info"} <= set(rollouts["batch"])
    assert rollouts["batch"]["state"].shape == (16, 4) and bool(rollouts["mask"].all())
    np.testing.assert_array_equal(ms.rl.get_policy_state(rollouts["state"])["params"], np.ones((4, 2)))


def test_cyreal_acts_with_the_policy_that_is_injected_before_next(rollouts):
    loader, source = rollouts["loader"], rollouts["source"]
    towards = np.array([[0, 0], [0, 0], [-1e6, 1e6], [0, 0]], np.float32)  # push to where the pole leans
    state = loader.init_state(jax.random.PRNGKey(1))
    state = loader.set_policy_state(state, {"params": towards, "recurrent_state": np.zeros(3, np.float32)})
    batch, state, _ = jax.device_get(loader.next(state))
    np.testing.assert_array_equal(batch["action"], batch["state"][:, 2] > 0)
    away = {"params": -towards, "recurrent_state": np.zeros(3, np.float32)}
    state = rollouts["set_loader_policy_state"](state, away)
    batch, _, _ = jax.device_get(loader.next(state))
    np.testing.assert_array_equal(batch["action"], batch["state"][:, 2] < 0)
    setters = (source.set_policy_state, rollouts["set_source_policy_state"])
    assert_trees_equal(*[setter(state.inner, away) for setter in setters])


def test_cyreal_rollouts_can_be_vmapped(rollouts):
    loader, keys = rollouts["loader"], jax.random.split(jax.random.PRNGKey(0), 3)
    batch, _, mask = jax.eval_shape(jax.vmap(lambda key: loader.next(loader.init_state(key))), keys)
    assert batch["state"].shape == (3, 16, 4) and mask.shape == (3, 16)


def test_cyreal_next_compiles_once_however_often_it_is_wrapped(count_compilations):
    source = cyreal.ArraySource({"x": np.arange(4)}, ordering="sequential")
    loader = cyreal.DataLoader([source, cyreal.BatchTransform(2)])
    _, state, _ = jax.jit(loader.next)(loader.init_state(jax.random.PRNGKey(0)))
    with count_compilations() as count:
        batch, _, _ = jax.jit(loader.next)(state)
    assert count == [0] and batch["x"].tolist() == [2, 3]


def test_cyreal_transforms_of_other_names_do_what_they_did():
    data = {"image": np.full((6, 2, 3), 255, np.uint8)}
    stages = [
        cyreal.ArraySource(data, ordering="sequential"),
        cyreal.BatchTransform(3),
        cyreal.NormalizeImageTransform(data_key="image"),
        cyreal.FlattenTransform("image", start_index=1),
    ]
    loader = cyreal.DataLoader(stages)
    batch, _, _ = loader.next(loader.init_state(jax.random.PRNGKey(0)))
    np.testing.assert_array_equal(batch["image"], np.ones((3, 6), np.float32))
    buffer = cyreal.BufferTransform(capacity=8, prefill=4, sample_size=2, mode="shuffled", write_mode="reservoir")
    assert buffer == ms.BufferTransform(8, 4, 2, "uniform", "reservoir")
    with refuses(ValueError, "FlattenTransform needs an axis 3 to start at", "'image': shape (3, 2, 3), uint8"):
        cyreal.DataLoader([*stages[:2], cyreal.FlattenTransform("image", start_index=3)])


# cereal


def apply(params, images):
    return images.reshape(len(images), -1).astype(np.float32) / 255 @ params["w"]


def cross_entropy(logits, labels):
    """The terms of every row and class: their sum over classes is the cross entropy."""
    return -jax.nn.one_hot(labels, 10) * jax.nn.log_softmax(logits)


@pytest.fixture(scope="module")
def cereal_start(mnist):
    """What the first block of cereal makes."""
    params = {"w": jnp.zeros((784, 10))}
    state = flax.training.train_state.TrainState.create(apply_fn=apply, params=params, tx=optax.sgd(0.1))
    return run(CEREAL[0], {"cross_entropy": cross_entropy, "train_state": state})


def test_cereal_step_takes_a_batch_apart_inside_of_jit(cereal_start):
    assert int(cereal_start["train_state"].step) == int(cereal_start["loader_state"].step) == 1
    loader = cereal_start["loader"]
    ((batch, mask),) = loader.iterate(loader.init_state(jax.random.PRNGKey(0), step=2))
    images, labels = batch
    assert images is batch["image"] and labels is batch["label"]
    assert images.shape == (BATCH, 28, 28, 1) and labels.shape == (BATCH,)
    assert int(mask.sum()) == 44 and not np.asarray(images)[44:].any()


def test_cereal_keeps_the_data_where_it_is_told(cereal_start):
    assert cereal_start["train_arrays"]["image"].devices() == {jax.devices("cpu")[0]}
    everywhere = cereal.dataset_to_jax(cereal_start["dataset"], storage_device=None)
    assert_trees_equal(everywhere, cereal_start["train_arrays"])


def test_cereal_pipelines_can_be_composed_by_hand():
    data = {"x": np.arange(ROWS)}
    given = run(CEREAL[1], {"data": data})
    np.testing.assert_array_equal(given["batch"]["x"], np.arange(BATCH))
    assert int(given["state"].step) == int(given["loader_state"].step) == 1
    batch, mask, _ = given["pipeline"].next(given["state"])
    np.testing.assert_array_equal(batch["x"], np.arange(BATCH, 2 * BATCH))
    assert bool(mask.all())


SMALL = {"image": np.ones((10, 2, 2), np.uint8), "label": np.arange(10)}


def small_loader():
    return cereal.DataLoader([cereal.ArraySampleSource(SMALL, ordering="sequential"), cereal.BatchTransform(4)])


def test_cereal_jits_a_training_step():
    loader, params = small_loader(), {"w": jnp.zeros((4, 10))}
    given = {
        "jax": jax,
        "jnp": jnp,
        "loader": loader,
        "model_apply": lambda params, batch, rng: apply(params, batch["image"]),
        "loss_fn": cross_entropy,
        "train_state": flax.training.train_state.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1)),
        "loader_state": loader.init_state(jax.random.PRNGKey(0)),
    }
    run(CEREAL[2], given)
    assert int(given["train_state"].step) == int(given["loader_state"].step) == 1


def test_cereal_scan_epoch_runs_a_body_that_draws_its_batches(count_compilations):
    loader = small_loader()
    given = {"loader": loader, "optimizer_update": tally, "opt_state": NOTHING}
    given["loader_state"] = loader.init_state(jax.random.PRNGKey(0))
    run(CEREAL[3], given)
    assert tuple(map(int, given["opt_state"])) == (10, 45)
    assert int(given["loader_state"].step) == loader.steps_per_epoch == 3
    again = NOTHING, given["loader_state"]
    with count_compilations() as count:
        (total, _), _ = loader.scan_epoch(again, None, given["body_fn"])
    assert count == [0] and tuple(map(int, total)) == (10, 45)
    (total, _), _ = jax.jit(lambda carry: loader.scan_epoch(carry, None, given["body_fn"]))(again)
    assert tuple(map(int, total)) == (10, 45)


def test_cereal_scan_epoch_carries_what_is_not_an_array(count_compilations):
    loader = small_loader()

    def body_fn(carry, _):
        model, count, loader_state = carry
        _, loader_state, mask = loader.next_batch(loader_state)
        total = model["total"] + jnp.sum(model["fn"](jnp.zeros(model["size"]))) + jnp.sum(mask)
        return ({**model, "total": total}, count + 1, loader_state), None

    model = {"total": jnp.int32(0), "fn": lambda x: x.astype(jnp.int32), "size": 2}
    (after, count, state), _ = loader.scan_epoch((model, 0, loader.init_state(jax.random.PRNGKey(0))), None, body_fn)
    assert (int(after["total"]), int(count), after["size"], after["fn"]) == (10, 3, 2, model["fn"])
    with count_compilations() as compilations:
        loader.scan_epoch((model, 0, state), None, body_fn)
    assert compilations == [0]


def test_cereal_scan_epoch_gives_batches_to_a_body_that_takes_them():
    loader = small_loader()
    state = loader.init_state(jax.random.PRNGKey(0))
    state, total, outputs = loader.scan_epoch(
        state, NOTHING, lambda carry, batch, mask: (tally(carry, batch, mask), mask.sum())
    )
    assert tuple(map(int, total)) == (10, 45) and outputs.tolist() == [4, 4, 2] and int(state.step) == 3
    with refuses(
        TypeError, "scan_epoch got body_fn(carry, _), which draws its batches itself", "(carry, None, body_fn)"
    ):
        loader.scan_epoch(state, NOTHING, lambda carry, _: (carry, None))


def test_cereal_host_callbacks_print_what_a_map_has_added(capsys):
    given = {"jnp": jnp, "train_data": SMALL, "cross_entropy": cross_entropy}
    given["model"] = lambda images: apply({"w": jnp.zeros((4, 10))}, images)
    loader = run(CEREAL[4], given)["loader"]
    batches = [batch for batch, _ in loader.iterate(loader.init_state(jax.random.PRNGKey(0)))]
    assert [batch["loss"].shape for batch in batches] == [()]
    # All classes are alike, each loss is the mean over them, and 118 of 128 rows are padding.
    assert losses_printed(capsys) == [pytest.approx(np.log(10) / 10 * 10 / 128)]


def test_cereal_transforms_can_be_given_the_source_they_stand_behind():
    source = cereal.ArraySampleSource({"image": np.full((4, 2, 2), 255, np.uint8)}, ordering="sequential")
    seen = []
    pipeline = cereal.NormalizeImageTransform(source, image_key="image", dtype=jnp.float32)
    pipeline = cereal.FlattenImageTransform(pipeline, image_key="image")
    pipeline = cereal.BatchTransform(inner=pipeline, batch_size=4)
    pipeline = cereal.MapTransform(pipeline, lambda batch, mask: {"image": batch["image"] * 3})
    pipeline = cereal.HostCallbackTransform(
        pipeline,
        lambda batch, mask: seen.append(batch) or {"sum": batch["image"].sum(1)},
        element_spec_override={"sum": jax.ShapeDtypeStruct((4,), np.float32)},
    )
    loader = cereal.DataLoader(pipeline=cereal.DevicePutTransform(pipeline))
    batch, _, _ = loader.next_batch(loader.init_state(jax.random.PRNGKey(0)))
    np.testing.assert_allclose(seen[0]["image"], np.full((4, 4), 3, np.float32), rtol=1e-6)
    (total,) = batch
    np.testing.assert_allclose(total, np.full(4, 12, np.float32), rtol=1e-6)


def test_cereal_sources_take_their_arguments_in_the_order_of_the_document(cereal_start):
    spec = {"x": jax.ShapeDtypeStruct((), np.float32)}
    disk = cereal.DiskSampleSource(10, lambda index: {"x": np.float32(index)}, spec, 16)
    assert (len(disk), disk.prefetch_size, disk.ordering) == (10, 16, "shuffle")
    stream = cereal.MNISTDiskSource("train", 16)
    assert (len(stream), stream.prefetch_size) == (ROWS, 16)
    env, env_params = gymnax.make("CartPole-v1")
    source = cereal.GymnaxSource(
        env, env_params, lambda obs, params, key: (obs[2] > params).astype(int), jnp.zeros(()), 8
    )
    assert (source.steps_per_epoch, source.element_spec()["action"].shape) == (8, ())


class Toy:
    """As environments were before Gymnax 1.0: five values, and no reset of its own."""

    def reset(self, key, params):
        return jnp.zeros((1,)), jnp.float32(0)

    def step(self, key, state, action, params):
        state = state + action
        return jnp.array([state]), state, -state, state >= 2.0, {}


def test_environments_whose_step_returns_five_values_run_as_they_were_written():
    def advance(obs, policy_state, new_episode, key):
        return jnp.float32(1), {"count": jnp.where(new_episode, 1, policy_state["count"] + 1)}

    source = cyreal.GymnaxSource(
        env=Toy(),
        env_params=None,
        policy_step_fn=advance,
        policy_state_template={"count": jnp.int32(0)},
        steps_per_epoch=4,
    )
    loader = cyreal.DataLoader([source, cyreal.BatchTransform(batch_size=4)])
    (batch, mask), *more = loader.iterate(loader.init_state(jax.random.PRNGKey(0)))
    assert batch["state"].tolist() == [[0], [1], [0], [1]] and batch["next_state"].tolist() == [[1], [2], [1], [2]]
    assert batch["reward"].tolist() == [-1, -2, -1, -2] and batch["done"].tolist() == [False, True, False, True]
    assert not batch["truncated"].any() and mask.all() and not more
    old = cereal.GymnaxSource(Toy(), None, lambda obs, params, key: params, jnp.float32(1), 4)
    assert old.element_spec()["done"].shape == ()


def test_cereal_batch_transform_does_host_work_on_each_batch():
    def augment(batch):
        assert isinstance(batch["x"], np.ndarray)
        return {"x": batch["x"] + 1}

    stages = [cereal.ArraySampleSource({"x": np.arange(4)}, ordering="sequential"), cereal.BatchTransform(2)]
    loader = cereal.DataLoader(pipeline=stages, batch_transform=augment)
    state = loader.init_state(jax.random.PRNGKey(0))
    assert [batch["x"].tolist() for batch, _ in loader.iterate(state)] == [[1, 2], [3, 4]]
    with refuses(TypeError, "DataLoader needs batch_transform to be a function. Got 3"):
        cereal.DataLoader(pipeline=stages, batch_transform=3)  # pyright: ignore[reportArgumentType]


class Countdown:
    """A source of the user's own: 2, 1, 0, 2, 1, 0, ..."""

    steps_per_epoch = 3

    def init_state(self, key):
        return jnp.int32(2)

    def next(self, state):
        return {"left": state}, jnp.bool_(True), jnp.where(state == 0, 2, state - 1)

    def element_spec(self):
        return {"left": jax.ShapeDtypeStruct((), np.int32)}


@pytest.mark.parametrize("dialect", [cyreal, cereal])
def test_new_behaviour_is_another_source(dialect):
    assert isinstance(Countdown(), dialect.Source)
    loader = dialect.DataLoader([Countdown(), dialect.BatchTransform(2)])
    batch, _, _ = loader.next_batch(loader.init_state(jax.random.PRNGKey(0)))
    assert batch["left"].tolist() == [2, 1]


@pytest.mark.parametrize("dialect", [cyreal, cereal])
def test_loaders_are_pytrees(dialect):
    source = dialect.ArraySampleSource({"x": np.arange(4)}, ordering="sequential")
    loader = dialect.DataLoader([source, dialect.BatchTransform(2)])
    assert type(jax.tree.map(lambda leaf: leaf, loader)) is dialect.DataLoader
    state = loader.init_state(jax.random.PRNGKey(0), step=1)
    batch, _, _ = jax.jit(lambda loader, state: loader.next_batch(state))(loader, state)
    assert batch["x"].tolist() == [2, 3]


def test_cereal_scan_reads_from_disk_and_raises_what_a_sample_raises():
    def read(index):
        if index == 5:
            raise LookupError("no such image")
        return {"x": np.float32(index)}

    before = reader_threads()
    loader = cereal.DataLoader([cereal.DiskSampleSource(6, read, ordering="sequential"), cereal.BatchTransform(2)])

    def body_fn(carry, _):
        total, loader_state = carry
        batch, loader_state, _ = loader.next_batch(loader_state)
        return (total + batch["x"].sum(), loader_state), None

    with refuses(LookupError, "no such image"):
        loader.scan_epoch((jnp.float32(0), loader.init_state(jax.random.PRNGKey(0))), None, body_fn)
    ours = [thread for thread in reader_threads() if thread not in before]
    for thread in ours:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in ours)


def test_a_batch_of_cereal_is_a_dict_in_every_other_way():
    batch = cereal.Batch(label=1, image=0)
    assert {**batch, "loss": 2} == {"label": 1, "image": 0, "loss": 2} and dict(batch) == batch
    assert "image" in batch and sorted(batch.keys()) == ["image", "label"]
    doubled = jax.tree.map(lambda leaf: leaf * 2, batch)
    assert type(doubled) is cereal.Batch and list(doubled) == [0, 2]
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(batch)] == ["['image']", "['label']"]


@pytest.mark.parametrize("dialect", [cyreal, cereal], ids=["cyreal", "cereal"])
def test_a_spec_may_be_declared_if_it_is_the_one_that_is_there(dialect):
    source = dialect.ArraySampleSource({"x": np.arange(10.0, dtype=np.float32)})
    sample, doubled = source.element_spec(), {"twice": jax.ShapeDtypeStruct((4,), np.float32)}
    assert sample == {"x": jax.ShapeDtypeStruct((), np.float32)}

    def double(value, mask):
        return {"twice": 2 * value["x"]}

    batch = dialect.BatchTransform(batch_size=4, element_spec_override=sample)
    mapped = dialect.MapTransform(fn=double, element_spec_override=doubled)
    assert dialect.DataLoader(pipeline=[source, batch, mapped]).element_spec() == doubled
    wrong = dialect.MapTransform(fn=double, element_spec_override={"twice": jax.ShapeDtypeStruct((4,), np.int32)})
    words = r"MapTransform\(double\) got an .*\['twice'\]: shape \(4,\), int32 declared, shape \(4,\), float32 found"
    with pytest.raises(ValueError, match=f"(?s){words}.*Leave it out"):
        dialect.DataLoader(pipeline=[source, batch, wrong])
    other = dialect.BatchTransform(batch_size=4, element_spec_override={"y": sample["x"]})
    with pytest.raises(ValueError, match=r"(?s)BatchTransform got an element_spec_override.*'y'.*none found"):
        dialect.DataLoader(pipeline=[source, other])


@pytest.mark.parametrize("dialect", [cyreal, cereal], ids=["cyreal", "cereal"])
def test_a_source_says_what_its_samples_are(dialect):
    spec = jax.ShapeDtypeStruct((3,), np.float32)
    disk = dialect.DiskSampleSource(length=4, sample_fn=lambda index: np.zeros(3, np.float32), sample_spec=spec)
    assert disk.element_spec() == spec
