"""Asking a store for a piece of a file: by obstore where it knows the kind of address, otherwise by fsspec."""

import dataclasses
import functools
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Protocol

from millstream.files.remote_options import CloudOptions
from millstream.files.urls import is_loopback, shown
from millstream.text.errors import needs

_OBSTORE = {"s3", "gs", "http", "https"}
_PLAIN_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)
# Which of the things that file systems tell about a file change with its contents.
_VERSION_KEYS = ("ETag", "etag", "e_tag", "generation", "VersionId", "version_id", "md5", "mtime", "LastModified")
_VERSION_KEYS += ("last_modified", "updated", "modified", "created")

_WHOLE = 1 << 30  # the largest file that is taken as a whole from a server that gives no parts

Kind = Literal["passing", "silent", "missing", "too short", "denied", "no ranges", "no list", "refused"]


class StoreFault(Exception):
    """What went wrong with one question; asking again may help if it is "passing" or "silent"."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind: Kind = kind


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some bytes of a file, and what the same answer says of the whole.

    Attributes:
        data: The bytes.
        size: Of the whole file.
        tag: Words that change when the contents do; empty if the store gives none.
        whole: All of the file, if there was no other way to have the bytes.
    """

    data: bytes
    size: int
    tag: str
    whole: bytes | None = None


class Listed(NamedTuple):
    """A file in a list.

    Attributes:
        url: Its address.
        size: In bytes.
        tag: As in a `Piece`; empty if a list does not say it.
    """

    url: str
    size: int
    tag: str


class Store(Protocol):
    """Where one file can be asked for."""

    def get(self, start: int, size: int) -> Piece:
        """At most that many bytes from a position on, fewer at the end of the file; its last ones if it is negative."""
        ...

    def list_files(self) -> Iterator[Listed]:
        """The files whose names begin with this one's, in any order."""
        ...


def open_store(caller: str, url: str, options: CloudOptions) -> Store:
    """Where to ask for an address. Nothing is asked yet."""
    scheme = _require_place(caller, url)
    if scheme == "http":
        _require_plain_http(caller, url, options)
    backend = ("obstore" if scheme in _OBSTORE else "fsspec") if options.backend is None else options.backend
    if backend == "obstore":
        with needs(f"{caller} with {scheme}://", "obstore", "cloud"):
            import obstore  # noqa: F401
        from obstore.exceptions import BaseError

        try:
            return _Obstore(scheme, url, *_object_store(scheme, url, _Hashed(options)), options)
        except (BaseError, TypeError, ValueError) as error:
            has_secrets = "@" in url or "?" in url  # and the text may have all of the address in it
            text = type(error).__name__ if has_secrets else f"{type(error).__name__}: {error}"
            raise ValueError(f"{caller} cannot open {shown(url)} with obstore and these options: {text}") from None
    with needs(f"{caller} with {scheme}://", "fsspec", "cloud"):
        import fsspec  # noqa: F401
    return _Fsspec(caller, url, options)


def _require_place(caller: str, url: str) -> str:
    """The scheme of an address that names a host, a bucket or, in memory, a file. Secrets in it are not shown."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_place = bool(parts.hostname or (parts.path and not parts.netloc and parts.scheme not in _OBSTORE))
    except ValueError:
        is_place = False
    scheme = url.partition("://")[0]
    if not is_place or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        raise ValueError(
            f"{caller} needs the address of a file, such as s3://bucket/name or https://host/name, or a path. "
            f"Got one that begins with {scheme[:20]}:// and names no host or bucket."
        )
    return scheme.lower()


def _require_plain_http(caller: str, url: str, options: CloudOptions) -> None:
    parts = urllib.parse.urlsplit(url)
    if not options.allow_http and not is_loopback(parts.hostname or ""):
        raise ValueError(
            f"{caller} reads over https, or over plain http from this machine: anybody between here and "
            f"{parts.hostname} could change the data. If you trust the network, say so: "
            f"millstream.integrations.cloud.configure('http://{parts.netloc.rpartition('@')[2]}/', allow_http=True)."
        )


class _Hashed:
    """Options as a key of a cache: equal if their fields are, which need not be hashable."""

    def __init__(self, options: CloudOptions) -> None:
        self.options = options

    def __hash__(self) -> int:
        return hash((self.options.timeout, self.options.deadline))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and self.options == other.options


def _object_store(scheme: str, url: str, key: _Hashed) -> tuple[Any, str]:
    """The obstore for an address, and the path in it. Files of one server share their connections."""
    parts = urllib.parse.urlsplit(url)
    if scheme in ("http", "https"):
        if parts.query or not _PLAIN_PATH.fullmatch(parts.path) or "/." in parts.path:
            return _connected(url, key), ""  # exactly as it is written
        return _connected(f"{scheme}://{parts.netloc}", key), parts.path[1:]
    # Names of objects may have a ? or % or # in them, so they are taken as they are written.
    bucket, _, path = url.removeprefix(f"{scheme}://").partition("/")
    return _connected(f"{scheme}://{bucket}", key), path


@functools.lru_cache(maxsize=64)
def _connected(base: str, key: _Hashed) -> Any:
    import obstore.store

    options, store = key.options, dict(key.options.store)
    local = is_loopback(urllib.parse.urlsplit(str(store.get("endpoint", base))).hostname or "")
    client = {
        "allow_http": options.allow_http or local,
        "connect_timeout": _seconds(options.timeout),
        "read_timeout": _seconds(options.timeout),
        "timeout": _seconds(options.deadline),
        "user_agent": "millstream",
        **store.pop("client_options", {}),
    }
    # Who reads counts and reports the retries itself, for all kinds of stores alike.
    store |= {"client_options": client, "retry_config": {"max_retries": 0}}
    return obstore.store.from_url(base, **store)


def _seconds(value: float) -> str:
    return f"{max(1, round(value * 1000))}ms"


class _Obstore:
    def __init__(self, scheme: str, url: str, store: Any, path: str, options: CloudOptions) -> None:
        self._scheme = scheme
        self._base = url[: len(url) - len(path)]
        self._store = store
        self._path = path
        self._timeout = options.timeout
        self._largest_whole = min(_WHOLE, options.cache_limit // 2)

    def get(self, start: int, size: int) -> Piece:
        try:
            return self._asked({"range": {"suffix": size} if start < 0 else (start, start + size)})
        except StoreFault as fault:
            if fault.kind != "no ranges":
                raise
        if start < 0:  # some servers know parts, but not how to count them from the end
            first = self.get(0, 1)
            if first.whole is None:
                return self.get(max(first.size - size, 0), size)
            return dataclasses.replace(first, data=first.whole[-size:])
        whole = self._asked({}, self._largest_whole)
        if len(whole.data) != whole.size:
            raise StoreFault("passing", f"it sent {len(whole.data)} of {whole.size} bytes")
        return dataclasses.replace(whole, data=whole.data[start : start + size], whole=whole.data)

    def list_files(self) -> Iterator[Listed]:
        import obstore
        from obstore.exceptions import BaseError

        if self._scheme in ("http", "https"):
            raise StoreFault("no list", "a web server does not say which files it has")
        try:
            # The store lists by folders, so what stands after the last one is compared here.
            for batch in obstore.list(self._store, self._path.rpartition("/")[0] or None):
                for meta in batch:
                    if meta["path"].startswith(self._path):
                        yield Listed(self._base + meta["path"], meta["size"], meta["e_tag"] or "")
        except (BaseError, OSError) as error:
            raise _obstore_fault(error, self._timeout) from None

    def _asked(self, options: dict[str, Any], limit: int | None = None) -> Piece:
        import obstore
        from obstore.exceptions import BaseError

        try:
            answer = obstore.get(self._store, self._path, options=options)  # pyright: ignore[reportArgumentType]
            meta = answer.meta
            if limit is not None and meta["size"] > limit:
                raise StoreFault("no ranges", f"it sends files as a whole, and this one has {meta['size']} bytes")
            data = answer.bytes().to_bytes()
        except (BaseError, OSError) as error:
            raise _obstore_fault(error, self._timeout) from None
        modified = meta["last_modified"]
        tag = meta["e_tag"] or meta["version"] or ("" if modified.timestamp() == 0 else modified.isoformat())
        return Piece(data, meta["size"], tag)


def _obstore_fault(error: Exception, timeout: float) -> StoreFault:
    """What an error of obstore means. Its text has the whole address in it, so only known parts are shown."""
    text = str(error)
    status = re.search(r"status code: (\d{3} [A-Za-z -]*\w)", text)
    kind = re.search(r"kind: (\w+)", text)
    answered = "" if status is None else f"it answered {status[1]}"
    name = type(error).__name__
    if isinstance(error, FileNotFoundError) or answered.startswith("it answered 410"):
        return StoreFault("missing", answered or "it has no such file")
    if name in ("PermissionDeniedError", "UnauthenticatedError") or re.match(r"it answered 40[13]\b", answered):
        return StoreFault("denied", answered or "it refuses these credentials")
    if name == "NotSupportedError":
        return StoreFault("no ranges", "it sends files as a whole, not in parts")
    if answered.startswith("it answered 416"):
        return StoreFault("too short", answered)
    if status is not None:
        passing = status[1][0] == "5" or status[1][:3] in ("408", "429")
        return StoreFault("passing" if passing and status[1][:3] != "501" else "refused", answered)
    if (kind is not None and kind[1] == "Timeout") or "TimedOut" in text:
        return StoreFault("silent", f"it was silent for {timeout:g} seconds")
    if "BadScheme" in text:
        return StoreFault(
            "refused", "it sends on to plain http, or has an endpoint with it (allow_http=True allows it)"
        )
    words = {"Connect": "the connection was refused", "Interrupted": "the connection broke off"}
    if kind is not None:
        return StoreFault("passing", words.get(kind[1], "the connection failed"))
    first = text.partition("\n")[0].partition("http")[0].strip() or name
    return StoreFault("passing", f"its answer cannot be read ({first})")


class _Fsspec:
    def __init__(self, caller: str, url: str, options: CloudOptions) -> None:
        import fsspec.core

        self._url = url
        try:
            self._system, self._path = fsspec.core.url_to_fs(url, **options.store)
        except ImportError as error:  # each kind of address has a package of its own
            raise ImportError(f"{caller} cannot open {url.partition('://')[0]}:// addresses: {error}") from None
        except ValueError as error:
            raise ValueError(f"{caller} cannot open {url.partition('://')[0]}:// addresses: {error}.") from None
        except OSError as error:  # some connect at once
            raise ConnectionError(f"{caller} cannot reach {shown(url)}: {error}. Check the address.") from None

    def list_files(self) -> Iterator[Listed]:
        try:
            folder = self._path.rpartition("/")[0]
            self._system.invalidate_cache(folder)
            for path in self._system.find(folder):
                if path.startswith(self._path):
                    yield Listed(self._url + path[len(self._path) :], 0, "")
        except (OSError, NotImplementedError) as error:
            raise StoreFault("no list", str(error) or type(error).__name__) from None

    def get(self, start: int, size: int) -> Piece:
        try:
            if start < 0:
                start = max(self._system.info(self._path)["size"] - size, 0)
            data = self._system.cat_file(self._path, start=start, end=start + size)
            # Asked for after the bytes: if the file is now what it was when it was opened, so were the bytes.
            self._system.invalidate_cache(self._path)
            found = self._system.info(self._path)
        except FileNotFoundError:
            raise StoreFault("missing", "it has no such file") from None
        except PermissionError as error:
            raise StoreFault("denied", str(error)) from None
        except OSError as error:
            kind = "silent" if isinstance(error, TimeoutError) else "passing"
            raise StoreFault(kind, str(error) or type(error).__name__) from None
        if found.get("type") == "directory" or not isinstance(found.get("size"), int):
            raise StoreFault("refused", "it is a folder, or has no known size")
        tags = [f"{name}={found[name]}" for name in _VERSION_KEYS if found.get(name) is not None]
        return Piece(bytes(data), found["size"], ", ".join(tags))
