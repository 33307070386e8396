"""Errors of reading that are nobody's exception: a reader that does not answer, a worker that died, no memory."""


class WorkerStalled(TimeoutError):
    """No batch came for as long as one may take; the text says where each reader was."""


class WorkerCrashed(RuntimeError):
    """A worker process died repeatedly; the message names the sample."""


class SharedMemoryFull(OSError):
    """There is not enough memory to share with worker processes."""
