"""Files that are not what they were."""


class FileChanged(OSError):
    """A file is not what it was when it was opened, or has become unreadable."""
