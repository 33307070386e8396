"""Rows as scalars, images and histograms for TensorBoard."""

import io
import os
import socket
import struct
import time
from typing import Any

from millstream.callbacks._writer import Row, Sink, Writer
from millstream.callbacks.contact_sheet import contact_sheet
from millstream.callbacks.log_file import write_whole
from millstream.loops.media import IMAGES, unpack_histogram
from millstream.loops.media_log import Kept
from millstream.loops.signatures import Every
from millstream.text.errors import needs, require_path
from millstream.text.png import encode_png

_EVENTS = "events.out.tfevents.*"


class _EventFile(Sink):
    caller = "tensorboard"
    takes_media = True

    def __init__(self, directory: Any, overwrite: bool) -> None:
        folder = require_path(self.caller, "directory to be a folder", directory)
        with needs(self.caller, "tensorboardX", "tensorboard"):
            from tensorboardX import record_writer
            from tensorboardX.proto import event_pb2, summary_pb2
        self.place = directory
        self._folder = folder.resolve()
        self._overwrite = overwrite
        self._crc, self._proto, self._summary = record_writer.masked_crc32c, event_pb2, summary_pb2
        self._file: io.FileIO | None = None
        self._hidden_from = 0  # the step from which on what earlier processes have written is not shown

    def open(self, step: int) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        earlier = list(self._folder.glob(_EVENTS))
        if earlier and step == 0:
            if not self._overwrite:
                raise FileExistsError(
                    f"{self.caller} begins a new run, and {self._folder} has events of another. Choose another folder, "
                    "or continue with that run (elapsed=), or give overwrite=True."
                )
            for file in earlier:
                file.unlink()
        # TensorBoard wants seconds in the name, and two files of one second must neither be one nor change places.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{time.time_ns()}"
        # Without a buffer: what does not fit on the disk is told once, and not again when the file is forgotten.
        self._file = io.FileIO(self._folder / name, "x")
        self._hidden_from = 0
        self._add([self._proto.Event(wall_time=time.time(), file_version="brain.Event:2")])
        if earlier and step:
            self._hide_from(step + 1)
        return 0

    def _hide_from(self, step: int) -> None:
        self._hidden_from = step
        restart = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._add([self._proto.Event(wall_time=time.time(), step=step, session_log=restart)])

    def write(self, rows: list[Row]) -> None:
        if rows[0].step < self._hidden_from:
            # What an earlier process had not written when it was saved; it may have come to it before it was killed.
            self._hide_from(rows[0].step)
        value_class, summary_class, event_class = self._summary.Summary.Value, self._summary.Summary, self._proto.Event
        events = []
        for row in rows:
            values = [value_class(tag=name, simple_value=value) for name, value in row.values.items()]
            values += [value_class(tag=item.path[1], **self._summary_of(item)) for item in row.media]
            events.append(event_class(wall_time=row.date, step=row.step, summary=summary_class(value=values)))
        self._add(events)

    def _summary_of(self, item: Kept) -> dict[str, Any]:
        """The image or histogram of a value, as the field of its message."""
        array, summary = item.read(), self._summary
        if item.path[0] == IMAGES:
            sheet = contact_sheet(array)
            colors = 1 if sheet.ndim == 2 else sheet.shape[2]
            png, (height, width) = encode_png(sheet), sheet.shape[:2]
            image = summary.Summary.Image(height=height, width=width, colorspace=colors, encoded_image_string=png)
            return {"image": image}
        found = unpack_histogram(array)
        middles = (found.edges[:-1] + found.edges[1:]) / 2
        histogram = summary.HistogramProto(
            min=found.edges[0],
            max=found.edges[-1],
            num=found.counts.sum(),
            sum=found.counts @ middles,
            sum_squares=found.counts @ middles**2,
            bucket_limit=found.edges[1:].tolist(),
            bucket=found.counts.tolist(),
        )
        return {"histo": histogram}

    def _add(self, events: list[Any]) -> None:
        """Write events as records: the length, the data, and a checksum after each."""
        parts = []
        for event in events:
            data = event.SerializeToString()
            length = struct.pack("<Q", len(data))
            parts += [length, struct.pack("<I", self._crc(length)), data, struct.pack("<I", self._crc(data))]
        assert self._file is not None
        write_whole(self._file, b"".join(parts))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def tensorboard(directory: str | os.PathLike[str], *, every: Every | None = None, overwrite: bool = False) -> Writer:
    """Write what is logged for TensorBoard, in the background, without TensorFlow.

    Example:
        >>> def train_step(state, batch):
        ...     return ms.logs().add_metric("loss", 0.5), state + 1
        >>> _ = ms.loop(0, range(3), {ms.every(1): [train_step, ms.callbacks.tensorboard("runs/first")]})

    Then `tensorboard --logdir runs` shows it. Every entry is a scalar, with the step and the date of its row, or an
    image or a histogram, if it was logged with `add_image` or `add_histogram`; several images are one. A new run
    refuses a folder that has events already. A resumed one (`elapsed=`) continues there: TensorBoard then hides what an
    earlier process has written of later steps. Errors and use by hand are as for `csv_logger`.

    Args:
        directory: A folder for this run.

    Other Args:
        every: Which rows to write, as for `csv_logger`.
        overwrite: Whether a new run replaces the events of another.
    """
    return Writer(_EventFile(directory, overwrite), every)
