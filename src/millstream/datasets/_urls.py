"""Which addresses may be asked for a file, and how they are opened."""

import urllib.parse
import urllib.request
from email.message import Message
from typing import IO

from millstream.files.urls import is_loopback, shown


class RefusedURL(Exception):
    """An address that must not be asked."""


def require_url(url: str, *, pinned: bool) -> None:
    """Refuse anything but https, and http without a pinned SHA-256 from another machine."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "https" or (parts.scheme == "http" and (pinned or is_loopback(parts.hostname or ""))):
        return
    if parts.scheme == "http":
        raise RefusedURL("plain http is only used for files with a known SHA-256")
    raise RefusedURL(f"{parts.scheme or 'no scheme'}: is not used for downloads, only https")


def require_redirect(source: str, target: str, *, pinned: bool) -> None:
    """Refuse to be sent from https to http, or to an address that would not be asked in the first place."""
    try:
        if source.startswith("https:") and not target.startswith("https:"):
            raise RefusedURL("it is not https")
        require_url(target, pinned=pinned)
    except RefusedURL as error:
        raise RefusedURL(f"refused to be sent on to {shown(target)}: {error}") from None


def make_opener(*, pinned: bool) -> urllib.request.OpenerDirector:
    """What opens https and http addresses, through the user's proxies, and no other kind."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(pinned),
    ):
        opener.add_handler(handler)
    return opener


class _Redirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message
    ) -> IO[bytes] | None:
        target = headers.get("location", headers.get("uri", ""))  # both of which urllib follows
        require_redirect(req.full_url, urllib.parse.urljoin(req.full_url, target), pinned=self.pinned)
        return super().http_error_302(req, fp, code, msg, headers)  # pyright: ignore[reportArgumentType]

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302  # pyright: ignore
