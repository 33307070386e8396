"""Lines of text for a terminal or a log: aligned, settled, in order."""

import io
import logging

import jax
import jax.numpy as jnp
import pytest

import millstream as ms


@jax.jit
def train_step(state, batch):
    return ms.logs().add_metric("loss", 1.5e-5 * (1 + state)), state + 1


@jax.jit
def evaluate(state, batch):
    return ms.logs().add_metric("loss", -state)


def train(writer, **options):
    return ms.train_loop(
        jnp.zeros(()),
        [0] * 6,
        {ms.on_train_step: train_step, ms.on_test_step: evaluate},
        test_dataset=[0],
        epoch_duration=3,
        callbacks=[writer],
        **options,
    )


LINES = [
    "step        1  epoch    0  loss 1.5e-05",
    "step        2  epoch    0  loss 3e-05",
    "step        3  epoch    1  loss 4.5e-05     loss_test -3",
    "step        4  epoch    1  loss 6e-05",
    "step        5  epoch    1  loss 7.5e-05",
    "step        6  epoch    2  loss 9e-05       loss_test -6",
]


def test_a_line_per_row_in_columns(capsys):
    train(ms.callbacks.console_logger())
    assert capsys.readouterr().out.splitlines() == LINES
    train(ms.callbacks.console_logger(every=ms.every(epochs=1)))
    assert capsys.readouterr().out.splitlines() == [LINES[2], LINES[5]]


def test_an_entry_that_comes_up_later_stands_after_the_others_and_names_stay_on_one_line(capsys):
    with ms.callbacks.console_logger() as writer:
        writer(ms.loops.Elapsed(steps=1), {"b": 1.0})
        writer(ms.loops.Elapsed(steps=2), {"a\nb": 2.0})
        writer(ms.loops.Elapsed(steps=3), {"b": float("nan"), "a\nb": 123456789.0})
    assert capsys.readouterr().out.splitlines() == [
        "step        1  b 1",
        "step        2                a b 2",
        "step        3  b nan         a b 1.235e+08",
    ]


def test_a_logger_gets_the_lines_and_nothing_is_printed(caplog, capsys):
    caplog.set_level(logging.INFO)
    writer = ms.callbacks.console_logger(every=2, logger=logging.getLogger("of the run"))
    train(writer)
    assert [record.getMessage() for record in caplog.records] == LINES[1::2]
    assert {(record.name, record.levelname) for record in caplog.records} == {("of the run", "INFO")}
    assert capsys.readouterr().out == ""
    assert repr(writer) == "console_logger('of the run')"


def test_a_reader_that_has_gone_does_not_end_the_run(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    with (
        monkeypatch.context() as patched,
        pytest.warns(RuntimeWarning, match="console_logger could not write some rows"),
    ):
        with pytest.warns(RuntimeWarning, match="console_logger left out 6 rows"):
            patched.setattr("sys.stdout", Closed())
            output = train(ms.callbacks.console_logger())
    assert output.elapsed.steps == 6


def test_what_is_not_a_logger_is_refused():
    with pytest.raises(
        TypeError,
        match=r"console_logger needs logger to be a logging.Logger, .*, or None to print. Got 'train' \(str\)",
    ):
        ms.callbacks.console_logger(logger="train")  # pyright: ignore[reportArgumentType]
