"""How files of other machines are read: how patiently, with which rights, and what is kept of them."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

from millstream.files.user_cache import user_cache
from millstream.text.errors import (
    describe_value,
    require_bool,
    require_choice,
    require_int,
    require_path,
    require_positive,
)


@dataclasses.dataclass(frozen=True)
class CloudOptions:
    """How files behind some addresses are read. `configure` in `millstream.integrations.cloud` sets them.

    Example:
        >>> from millstream.integrations.cloud import CloudOptions
        >>> CloudOptions(cache_limit=0).timeout  # seconds
        20.0

    Args:
        timeout: Seconds of silence, while connecting or reading, after which an answer is given up.
        deadline: Seconds after which a piece that could not be had is an error. Keep it below
            `ms.reading.settings.stall_seconds`, whose error knows less.
        retries: How often a piece is asked for again when the answer breaks off, is late, or an error of the server.
        backoff: Seconds before the second retry; they double every time. The first is at once.
        connections: How many pieces are asked for at the same time by one reader, and ahead of need by all of them.
        hedge: Seconds without an answer after which a piece is asked for a second time, once; the first answer counts.
            None never does it.
        read_ahead: The most bytes that are fetched ahead of need and wait in memory, all files of a process together.
        cache_folder: Where pieces are kept. None is `millstream/blocks` in the user's cache folder.
        cache_limit: The most bytes that are kept, the least recently used are removed first; 0 keeps nothing. If the
            files that a process has open have more than half of that together, only what they are indexed by is kept.
        stage: Whether blocks are kept also where the files do not fit together: what some processes of this machine
            read in order, or by blocks, then comes once for all of them.
        allow_http: Whether plain http, which anybody on the way can change, may be used for other machines than this.
        backend: "obstore" or "fsspec". None takes obstore for the addresses it knows, and fsspec for the others.
        store: What the package is told: options of obstore's `S3Store`, `GCSStore` or `HTTPStore` (region, endpoint,
            keys, `skip_signature`, `client_options`, ...) or of the fsspec file system. A copy of a source in a worker
            process takes them along; keys in environment variables need not be given here.
    """

    timeout: float = 20.0
    deadline: float = 100.0
    retries: int = 8
    backoff: float = 0.25
    connections: int = 64
    hedge: float | None = None
    read_ahead: int = 512 << 20
    cache_folder: str | os.PathLike[str] | None = None
    cache_limit: int = 4 << 30
    stage: bool = False
    allow_http: bool = False
    backend: Literal["obstore", "fsspec"] | None = None
    store: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        caller = "cloud.configure"
        for name in ("timeout", "deadline", "backoff"):
            require_positive(caller, name, getattr(self, name), "a number of seconds")
        if self.hedge is not None:
            require_positive(caller, "hedge", self.hedge, "a number of seconds")
        for name, least in {"retries": 0, "connections": 1, "cache_limit": 0, "read_ahead": 0}.items():
            require_int(caller, name, getattr(self, name), least=least)
        if self.backend is not None:
            require_choice(caller, "backend", self.backend, ["obstore", "fsspec"])
        require_bool(caller, "stage", self.stage)
        require_bool(caller, "allow_http", self.allow_http)
        if self.cache_folder is not None:
            require_path(caller, "cache_folder to be a path", self.cache_folder)
        if not isinstance(self.store, Mapping):
            raise TypeError(f"{caller} needs store to be a dict of options. Got {type(self.store).__name__}.")

    @property
    def folder(self) -> pathlib.Path:
        """Where pieces are kept."""
        if self.cache_folder is not None:
            return pathlib.Path(self.cache_folder).expanduser().absolute()
        return user_cache() / "blocks"


_last_options: dict[str, tuple[dict[str, Any], CloudOptions]] = {}  # of thousands of files, most have the same
# Fields by the beginning of the address they are for; of several, the longest has the last word.
_configured: dict[str, dict[str, Any]] = {}


def configure(prefix: str = "", **options: Any) -> None:
    """Say how files whose address begins with `prefix` are read, from their next opening on.

    What is said for a longer beginning goes before what is said for a shorter one, field by field.

    Example:
        >>> from millstream.integrations import cloud
        >>> cloud.configure("s3://", cache_limit=20 << 30)
        >>> cloud.configure("s3://my-bucket/", store={"region": "eu-central-1", "skip_signature": True})
        >>> found = cloud.options_for("s3://my-bucket/x.npy")
        >>> found.store["region"], found.cache_limit >> 30
        ('eu-central-1', 20)

    Args:
        prefix: The beginning of the addresses; by default, all.
        **options: Fields of `CloudOptions`; those that are left out stay as they are.
    """
    if not isinstance(prefix, str) or (prefix and "://" not in prefix):
        raise ValueError(
            f"cloud.configure needs the beginning of addresses, such as 's3://bucket/'. Got {describe_value(prefix)}."
        )
    known = [field.name for field in dataclasses.fields(CloudOptions)]
    for name in options:
        if name not in known:
            raise TypeError(f"cloud.configure has no option {name!r}. It has {', '.join(known)}.")
    together = _configured.get(prefix, {}) | options
    CloudOptions(**together)
    _configured[prefix] = together


def options_for(url: str) -> CloudOptions:
    """What was said for an address.

    Example:
        >>> from millstream.integrations import cloud
        >>> cloud.options_for("gs://bucket/x.npy").retries
        8

    Args:
        url: Of a file.
    """
    found: dict[str, Any] = {}
    for prefix in sorted(_configured, key=len):
        if url.startswith(prefix):
            found |= _configured[prefix]
    last = _last_options.get("last")
    if last is None or last[0] != found:
        last = _last_options["last"] = found, CloudOptions(**found)  # checking them takes longer than all else here
    return last[1]
