"""Convolutions inside loops are those that CPUs compute fast, and give the numbers of a step outside a loop."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import millstream as ms
from millstream.pipeline.convolutions import with_fast_convolutions

pytestmark = pytest.mark.optimized

FAST = re.compile(r"b\d*f_\d*io->b\d*f")  # rows, space, channels; space, input and output channels


def layouts(program, *values):
    """The orders of axes of all convolutions in a compiled program."""
    text = jax.jit(program).lower(*values).compile().as_text() or ""
    return re.findall(r"dim_labels=([^,]+),", text)


def loss(kernels, images):
    for kernel in kernels:
        images = jax.nn.relu(lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=LAYOUT))
    return jnp.mean(images**2)


LAYOUT = ("NHWC", "HWIO", "NHWC")
KERNELS = [jnp.full((3, 3, 1, 4), 0.1), jnp.full((3, 3, 4, 4), 0.1)]
IMAGES = jnp.asarray(np.random.default_rng(0).random((3, 2, 6, 6, 1), np.float32))


def train_step(kernels, images):
    value, gradients = jax.value_and_grad(loss)(kernels, images)
    return [kernel - 0.1 * gradient for kernel, gradient in zip(kernels, gradients, strict=True)], value


def test_the_compiler_leaves_slow_convolutions_in_a_loop_and_none_are_left_here():
    plain = layouts(lambda kernels, images: lax.scan(train_step, kernels, images), KERNELS, IMAGES)
    assert not all(map(FAST.fullmatch, plain)), "XLA has learnt it: pipeline/convolutions.py can go"
    found = layouts(
        lambda kernels, images: lax.scan(with_fast_convolutions(train_step), kernels, images), KERNELS, IMAGES
    )
    assert len(found) == len(plain) and all(map(FAST.fullmatch, found))


def test_steps_in_a_loop_give_the_numbers_of_steps_outside():
    kernels, values, step = KERNELS, [], jax.jit(train_step)
    for images in IMAGES:
        kernels, value = step(kernels, images)
        values.append(value)
    found, losses = lax.scan(with_fast_convolutions(train_step), KERNELS, IMAGES)
    np.testing.assert_allclose(losses, values, rtol=1e-6)
    for one, other in zip(found, kernels, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize(
    ("rows", "kernel", "names", "options"),
    [
        ((2, 3, 8), (4, 3, 3), ("NCH", "OIH", "NCH"), {"window_strides": (2,)}),
        ((2, 3, 8, 7), (4, 3, 3, 2), ("NCHW", "OIHW", "NCHW"), {"lhs_dilation": (2, 1), "window_strides": (1, 2)}),
        ((8, 4, 7, 2), (3, 2, 2, 6), ("HCWN", "HWIO", "CNHW"), {"feature_group_count": 2, "rhs_dilation": (1, 2)}),
        ((4, 3, 8, 7), (4, 3, 3, 2), ("NCHW", "OIHW", "NCHW"), {"batch_group_count": 2}),
        ((2, 3, 5, 4, 4), (4, 3, 2, 2, 2), ("NCDHW", "OIDHW", "NCDHW"), {}),
    ],
    ids=["one axis", "two axes", "groups", "groups of rows", "three axes"],
)
def test_all_kinds_of_convolutions_keep_their_meaning(rows, kernel, names, options):
    make = np.random.default_rng(1)
    rows, kernel = (jnp.asarray(make.integers(-4, 5, shape).astype(np.float32)) for shape in (rows, kernel))
    options = {"window_strides": (1,) * (rows.ndim - 2), "padding": "SAME", **options}
    if "lhs_dilation" in options:
        options["padding"] = [(1, 2), (0, 1)]

    def convolve(rows, kernel):
        return lax.conv_general_dilated(rows, kernel, dimension_numbers=names, **options)

    found = with_fast_convolutions(convolve)(rows, kernel)
    np.testing.assert_array_equal(found, convolve(rows, kernel))  # whole numbers, so any order of sums is exact


def wrapped_in_a_call(step):
    @jax.custom_vjp
    def with_own_gradient(kernels, images):
        return loss(kernels, images)

    with_own_gradient.defvjp(
        lambda kernels, images: (with_own_gradient(kernels, images), (kernels, images)),
        lambda kept, given: (jax.tree.map(lambda leaf: given * leaf, jax.grad(loss)(*kept)), None),
    )
    return {
        "jit": jax.jit(step),
        "checkpoint": lambda kernels, images: (kernels, jax.checkpoint(jax.grad(loss))(kernels, images)),
        "cond": lambda kernels, images: lax.cond(
            images.sum() > 0, step, lambda k, i: (k, jnp.float32(0)), kernels, images
        ),
        "scan": lambda kernels, images: lax.scan(step, kernels, images[None]),
        "while": lambda kernels, images: (lax.fori_loop(0, 2, lambda _, k: step(k, images)[0], kernels), 0),
        "custom gradient": lambda kernels, images: (kernels, jax.value_and_grad(with_own_gradient)(kernels, images)),
        "vmap": lambda kernels, images: (kernels, jax.vmap(jax.grad(loss), (None, 0))(kernels, images[None])),
    }


@pytest.mark.parametrize("name", wrapped_in_a_call(train_step))
def test_convolutions_are_found_inside_other_calls(name):
    step = wrapped_in_a_call(train_step)[name]
    assert all(
        map(FAST.fullmatch, layouts(lambda *given: lax.scan(with_fast_convolutions(step), *given), KERNELS, IMAGES))
    )
    found, expected = with_fast_convolutions(step)(KERNELS, IMAGES[0]), step(KERNELS, IMAGES[0])
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), found, expected)


def test_a_body_without_convolutions_keeps_its_structure_and_effects():
    seen = []

    def body(carry, x):
        jax.debug.callback(lambda value: seen.append(int(value)), x)
        return {"sum": carry["sum"] + x, "none": None}, (x, {"twice": 2 * x})

    found = lax.scan(with_fast_convolutions(body), {"sum": 0, "none": None}, jnp.arange(3))
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2]
    assert jax.tree.map(np.asarray, found[0]) == {"sum": 3, "none": None}
    np.testing.assert_array_equal(found[1][1]["twice"], [0, 2, 4])


def image_loader():
    return ms.DataLoader(
        [ms.ArraySampleSource({"image": np.asarray(IMAGES).reshape(6, 6, 6, 1)}), ms.BatchTransform(2)]
    )


def test_an_epoch_as_one_program_and_fused_steps_have_fast_convolutions():
    loader = image_loader()
    state = loader.init_state(jax.random.key(0))

    def body(kernels, batch, mask):
        return train_step(kernels, batch["image"])

    def epoch(state, kernels):
        return loader.scan_epoch(state, kernels, body)

    found = layouts(epoch, state, KERNELS)
    assert found and all(map(FAST.fullmatch, found))


def test_a_fused_run_with_convolutions_equals_one_step_by_step():
    @jax.jit
    def step(kernels, batch):
        kernels, value = train_step(kernels, batch[0]["image"])
        return ms.logs().add_metric("loss", value), kernels

    def run(**options):
        return ms.train_loop(
            KERNELS, image_loader(), {ms.on_train_step: step}, stop=6, key=jax.random.key(1), **options
        )

    expected, found = run(), run(fuse=4)
    np.testing.assert_allclose(found.history.collect("loss"), expected.history.collect("loss"), rtol=1e-6)
    for one, other in zip(found.state, expected.state, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
