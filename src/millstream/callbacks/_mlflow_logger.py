"""Rows for MLflow."""

import itertools
import re
from collections.abc import Callable
from typing import Any, Protocol

from millstream.callbacks._writer import Row, Sink, Writer
from millstream.callbacks.contact_sheet import contact_sheet
from millstream.loops.elapsed import seconds
from millstream.loops.media import IMAGES
from millstream.loops.signatures import Every
from millstream.text.errors import describe_value, needs

_AT_ONCE = 1000  # metrics that a server takes in one request
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]", re.ASCII)


class _MlflowRun(Sink):
    caller = "mlflow_logger"
    takes_media = True

    def __init__(self, run: Any, client: Any, timeout: Any) -> None:
        with needs(self.caller, "mlflow", "mlflow"):
            import mlflow  # pyright: ignore[reportMissingImports]
            from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]
        run = mlflow.active_run() if run is None else run
        if run is None:
            raise ValueError(f"{self.caller} needs a run, and none is active. Call mlflow.start_run(), or give run=.")
        run_id = run if isinstance(run, str) else getattr(getattr(run, "info", None), "run_id", None)
        if not isinstance(run_id, str):
            raise TypeError(f"{self.caller} needs a run of MLflow, or its id. Got {describe_value(run)}.")
        self.patience = seconds(self.caller, timeout)
        self._run_id = self.place = run_id
        self._client = mlflow.MlflowClient() if client is None else client
        self._metric = Metric

    def write(self, rows: list[Row]) -> None:
        metrics = (
            self._metric(_NOT_ALLOWED.sub("_", name), value, int(row.date * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        )
        while some := list(itertools.islice(metrics, _AT_ONCE)):
            self._client.log_batch(self._run_id, metrics=some)
        for row in rows:
            for item in row.media:
                if item.path[0] == IMAGES:
                    name = _NOT_ALLOWED.sub("_", item.path[1])
                    self._client.log_image(self._run_id, contact_sheet(item.read()), key=name, step=row.step)


class MlflowClient(Protocol):
    """A client of MLflow, as far as it is used here; of one that logs images, `log_image` is used, too."""

    @property
    def log_batch(self) -> Callable[..., object]:
        """Takes the id of a run, and `metrics=`."""
        ...


def mlflow_logger(
    run: object = None, *, client: MlflowClient | None = None, every: Every | None = None, timeout: float = 30.0
) -> Writer:
    """Log to a run of MLflow, in the background, many metrics in one request.

    Example:
        >>> with mlflow.start_run():  # doctest: +SKIP
        ...     ms.train_loop(state, dataset, callbacks=[ms.callbacks.mlflow_logger()])

    Every entry is a metric, with the step and the date of its row; characters that MLflow does not allow in names
    become `_`. Images are logged as such; MLflow has no histograms. A server must not end a run: errors and rows that
    come too fast are as for `wandb_logger`. A run that is resumed logs the steps that it repeats once more. The run
    stays active: end it yourself.

    Args:
        run: What `mlflow.start_run` returned, or the id of a run; None: the active one.

    Other Args:
        client: The `MlflowClient` to log with; None: one of the current tracking server.
        every: Which rows to log, as for `csv_logger`.
        timeout: Seconds to wait for rows on their way, when the loop ends.
    """
    return Writer(_MlflowRun(run, client, timeout), every)
