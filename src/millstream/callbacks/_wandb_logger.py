"""Rows for Weights & Biases."""

from collections.abc import Callable
from typing import Any, Protocol

from millstream.callbacks._writer import Row, Sink, Writer
from millstream.callbacks.contact_sheet import contact_sheet
from millstream.loops.elapsed import seconds
from millstream.loops.media import IMAGES, unpack_histogram
from millstream.loops.media_log import Kept
from millstream.loops.signatures import Every
from millstream.text.errors import describe_value


class _WandbRun(Sink):
    caller = "wandb_logger"
    takes_media = True
    reserved = frozenset(("samples", "epochs", "time"))

    def __init__(self, run: Any, timeout: Any) -> None:
        if not callable(getattr(run, "log", None)):
            raise TypeError(f"{self.caller} needs a run: wandb.init(...). Got {describe_value(run)}.")
        self.patience = seconds(self.caller, timeout)
        self._run = run

    def write(self, rows: list[Row]) -> None:
        for row in rows:
            units = {"samples": row.samples, "epochs": row.epochs, "time": row.time}
            known = {unit: value for unit, value in units.items() if value is not None}
            media = {item.path[1]: _as_wandb(item) for item in row.media}
            self._run.log(row.values | media | known, step=row.step)


def _as_wandb(item: Kept) -> Any:
    import wandb  # pyright: ignore[reportMissingImports]

    array = item.read()
    if item.path[0] == IMAGES:
        return wandb.Image(contact_sheet(array))
    found = unpack_histogram(array)
    return wandb.Histogram(np_histogram=(found.counts, found.edges))


class WandbRun(Protocol):
    """A run of Weights & Biases, as far as it is used here."""

    @property
    def log(self) -> Callable[..., object]:
        """Takes values by name, and `step=`."""
        ...


def wandb_logger(run: WandbRun, *, every: Every | None = None, timeout: float = 30.0) -> Writer:
    """Log to a run of Weights & Biases, in the background.

    Example:
        >>> import types
        >>> run = types.SimpleNamespace(log=lambda values, step: print(step, values["loss"]))  # or wandb.init()
        >>> def train_step(state, batch):
        ...     return ms.logs().add_metric("loss", 0.5), state + 1
        >>> _ = ms.loop(0, range(2), {ms.every(1): [train_step, ms.callbacks.wandb_logger(run)]})
        1 0.5
        2 0.5

    A row is logged with its step; samples, epochs and time are there as well, to plot over. Images and histograms are
    logged as such. A server must not end a
    run: errors are only warned of, and if rows come faster than they can be sent for a long time, the oldest are left
    out, and a warning says how many. W&B itself leaves out steps that its run has already, so a run that is resumed
    from an earlier step needs `wandb.init(resume_from=...)`, or is not logged again until it is past them. The run
    stays
    open: finish it yourself.

    Args:
        run: What `wandb.init` returned.

    Other Args:
        every: Which rows to log, as for `csv_logger`.
        timeout: Seconds to wait for rows on their way, when the loop ends.
    """
    return Writer(_WandbRun(run, timeout), every)
