"""How much memory this process and its devices use."""

import os
import sys

import jax


def memory_use() -> dict[str, int]:
    """Bytes by name; a name whose value nobody knows is not there."""
    host = _resident()
    return ({} if host is None else {"host_memory": host}) | _device_memory()


def _resident() -> int | None:
    """Bytes of memory that this process holds; where the system does not say, the most that it ever held."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _device_memory() -> dict[str, int]:
    """Bytes in use on the devices of this process, and the most that ever were; the CPU does not say."""
    try:
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
    except (RuntimeError, NotImplementedError):
        return {}
    names = {"device_memory": "bytes_in_use", "device_memory_peak": "peak_bytes_in_use"}
    return {name: sum(each[key] for each in stats) for name, key in names.items() if all(key in each for each in stats)}
