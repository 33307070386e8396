"""Addresses: how they are shown, and which of them are this very machine."""

import ipaddress
import urllib.parse


def shown(url: str) -> str:
    """The address without user name, password and query, which may be secrets."""
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def is_loopback(host: str) -> bool:
    """Whether a host name is this machine, so that nobody is between."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
