"""Readers on other machines: an executor whose workers are Ray actors."""

import contextlib
import dataclasses
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from millstream.integrations._ray_group import RayGroup, RayJob
from millstream.reading.host_source import HostSource
from millstream.reading.slots import Layout
from millstream.reading.threads import check_executor
from millstream.reading.workers.group_backend import GroupBackend
from millstream.text.errors import (
    describe_value,
    needs,
    require_callable,
    require_mapping,
    require_positive,
    require_text,
)
from millstream.text.summaries import call_text

_PROBE_SECONDS = 10.0  # Ray itself waits without an end for a cluster that is not there
_OWN = ("num_cpus", "max_restarts", "max_task_retries", "max_concurrency", "concurrency_groups", "lifetime", "name")
_connecting = threading.Lock()


@dataclasses.dataclass(frozen=True)
class RayActors:
    """Read batches in Ray actors, on the machines of a Ray cluster: right where decoding takes more cores than one has.

    Its batches are those of every other executor, bit for bit, and a run that was saved with it continues with any
    other. The source is sent once to each machine, its arrays through Ray's object store, where all actors of a machine
    share them; there they are read-only, except small ones. Files have to be where every machine finds them. An actor
    that dies is replaced, what it had begun is read again, and `loader.stats()` counts it. Actors end when the last
    iterator is closed.

    Reads through the Ray that this process is connected to. If it is not connected, it connects to `address`, to the
    cluster in `RAY_ADDRESS`, or to one that was started on this machine. If there is none, Ray is started here, with a
    warning.

    Example:
        >>> from millstream.integrations.ray import RayActors
        >>> RayActors(16, num_cpus=2, options={"resources": {"reader": 1}})
        RayActors(16, num_cpus=2, options={resources: {reader: 1}})

    Args:
        workers: How many actors; that many batches more than `prefetch` are in flight. From 4 on, half of them share a
            batch.
        ordered: False hands out whichever batch is read first. Every sample still comes exactly once, but the position
            in the stream is known at its end only.
        num_cpus: Cores that Ray keeps free for each actor.
        options: What else `ray.remote` takes for an actor: `resources`, `memory`, `runtime_env`, `scheduling_strategy`
            ("SPREAD" unless you say so), `label_selector`.
        startup: A function called once in each actor, before it reads.
        address: Of the cluster: "10.0.0.1:6379", or "auto" for the one that this machine is part of.
        timeout: Seconds without a batch that are an error; None for `ms.reading.settings.stall_seconds`.
        start_timeout: Seconds that the first actor may take to start, with machines that have to be started for it.
    """

    workers: int
    ordered: bool = True
    num_cpus: float = 1
    options: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    startup: Callable[[], object] | None = None
    address: str | None = None
    timeout: float | None = None
    start_timeout: float = 120.0
    reader_names: ClassVar[tuple[str, str]] = ("Ray actor", "Ray actors")

    def __post_init__(self) -> None:
        check_executor(self, self.workers, self.ordered, self.timeout)
        require_positive("RayActors", "num_cpus", self.num_cpus)
        require_positive("RayActors", "start_timeout", self.start_timeout, "a number of seconds")
        if self.options is not None:
            _check_options(self.options)
            object.__setattr__(self, "options", dict(self.options))
        if self.startup is not None:
            require_callable("RayActors", "startup", self.startup)
        if self.address is not None:
            require_text("RayActors", "address", self.address)

    def ahead(self, prefetch: int) -> int:
        """Batches in flight besides the one that is asked for."""
        return prefetch + self.workers - 1

    def open(self, source: HostSource, layout: Layout, ahead: int, tolerant: bool) -> GroupBackend[RayJob]:
        """Actors for one stream."""
        group = RayGroup(
            _connected(self.address),
            source,
            layout,
            self.workers,
            ahead,
            tolerant=tolerant,
            startup=self.startup,
            options={"scheduling_strategy": "SPREAD", **(self.options or {}), "num_cpus": self.num_cpus},
            name=repr(self),
            start_timeout=self.start_timeout,
        )
        return GroupBackend(group, "RayActors", type(source).__name__, self.timeout)

    def __repr__(self) -> str:
        return call_text(self)


def _check_options(options: Any) -> None:
    require_mapping("RayActors", "options", options, "a dict of what ray.remote takes")
    for name in options:
        if not isinstance(name, str) or name in _OWN:
            raise ValueError(
                f"RayActors needs options without {describe_value(name)}. It starts and replaces actors itself; their "
                "number is workers, and their cores are num_cpus."
            )


def _connected(address: str | None) -> Any:
    """Ray, connected to a cluster."""
    with needs("RayActors", "ray", "ray"):
        import ray
    with _connecting:
        if ray.is_initialized():
            _require_same(ray, address)
            return ray
        if address is None:
            address = os.environ.get("RAY_ADDRESS")
        if address is not None:
            _require_reachable(address)
            try:
                with _own_signals():
                    ray.init(address=address)
            except ConnectionError as error:
                raise _no_cluster(address, str(error)) from None
            return ray
        with _own_signals(), warnings.catch_warnings():
            # What is forked here is replaced by a program of Ray's at once.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init()  # Ray that was started on this machine, or starts now
        if len(ray.nodes()) > 1:
            return ray
        warnings.warn(
            "RayActors reads on this machine alone: this process was not connected to a Ray cluster, so it started "
            "Ray here, or found one of a single machine. To read on others, pass address=..., or call ray.init(...) "
            "before. On one machine, Processes do the same for less.",
            stacklevel=4,
        )
        return ray


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Give SIGTERM back to the program: Ray takes it, and would abort a run that is about to save."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


def _require_same(ray: Any, address: str | None) -> None:
    here = ray.get_runtime_context().gcs_address
    if address is not None and ":" in address and "://" not in address and address != here:
        raise ValueError(
            f"RayActors needs the cluster that this process is connected to, {here}. Got address={address!r}. Leave it "
            "out, or call ray.shutdown() before."
        )


def _require_reachable(address: str) -> None:
    """Refuse an address at which nothing listens."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon:
        return
    try:
        with contextlib.closing(socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS)):
            pass
    except (OSError, ValueError) as error:
        raise _no_cluster(address, str(error)) from None


def _no_cluster(address: str, found: str) -> ConnectionError:
    return ConnectionError(
        f"RayActors needs a Ray cluster at {address!r}, and there is none: {found.rstrip('.')}. Start one there with "
        "`ray start --head`, or correct address=... or RAY_ADDRESS."
    )
