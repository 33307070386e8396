"""Rows as lines of text."""

import logging
import sys

from millstream.callbacks._writer import Row, Sink, Writer
from millstream.loops.signatures import Every
from millstream.text.errors import describe_value

_NUMBER = 10  # characters of a value; -1.234e-05 has as many


class _Console(Sink):
    caller = "console_logger"
    separator = "."
    reserved = frozenset(("step", "epoch"))
    patience = 30.0  # a pipe that is closed, or a terminal that is held, does not end a run

    def __init__(self, logger: logging.Logger | None) -> None:
        if not isinstance(logger, logging.Logger | None):
            raise TypeError(
                f"{self.caller} needs logger to be a logging.Logger, such as logging.getLogger('train'), or None to "
                f"print. Got {describe_value(logger)}."
            )
        self.place = None if logger is None else logger.name
        self._logger = logger
        self._names: dict[str, None] = {}  # in the order in which they came up, which is that of the columns

    def open(self, step: int) -> int:
        self._names = {}
        return 0

    def write(self, rows: list[Row]) -> None:
        for row in rows:
            self._names.update(dict.fromkeys(row.values))
            self._say(self._line(row))

    def _line(self, row: Row) -> str:
        epoch = "" if row.epochs is None else f"  epoch {row.epochs:>4}"
        parts = [f"step {row.step:>8,}{epoch}"]
        for name in self._names:
            text = f"{name} {row.values[name]:<{_NUMBER}.4g}" if name in row.values else " " * (len(name) + 1 + _NUMBER)
            parts.append(text)
        return " ".join("  ".join(parts).rstrip().splitlines())  # a name may have lines

    def _say(self, line: str) -> None:
        if self._logger is not None:
            self._logger.info("%s", line)
        else:
            print(line, file=sys.stdout, flush=True)


def console_logger(*, every: Every | None = None, logger: logging.Logger | None = None) -> Writer:
    """Print a line for each row of what is logged, or hand it to a logger, in the background.

    Example:
        >>> def train_step(state, batch):
        ...     return ms.logs().add_metric("loss", 1 / (1 + state)), state + 1
        >>> lines = ms.callbacks.console_logger(every=2)
        >>> _ = ms.loop(0, range(4), {ms.every(1): [train_step, lines]})
        step        2  loss 0.5
        step        4  loss 0.25

    Values stand below each other: an entry keeps the place at which it came up first. A row is printed when its step
    is over, by the first process only, so nothing waits for the device; what else the program prints may come before.
    Lines that cannot be written, because nobody reads them any more, do not end the run: a warning says so.

    Args:
        every: Which rows, as for `csv_logger`: a number of steps, or a schedule such as
            `ms.every(100) | ms.every(epochs=1)`.
        logger: A `logging.Logger`, which gets the lines with level INFO. None: they are printed to stdout.
    """
    return Writer(_Console(logger), every)
