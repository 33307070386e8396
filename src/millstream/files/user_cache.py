"""Where the caches of this user are."""

import os
import pathlib


def user_cache() -> pathlib.Path:
    """Our folder in the user's cache folder, which need not be there."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return pathlib.Path(base if base else "~/.cache").expanduser() / "millstream"
