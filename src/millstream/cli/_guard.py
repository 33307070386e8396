"""The guard of `millstream launch`: ends the processes of a launcher that was killed and could not do it itself.

A file of its own that imports nothing of the package. Every process names itself with `+pid` on the guard's input, as
the first thing it does, and the launcher strikes it off with `-pid`. Input ends when the launcher is gone and no
process has yet to name itself, so none is missed.
"""

import contextlib
import os
import signal
import sys
import time


def main() -> None:
    """Wait for the end of the input, then kill who is left, and the groups they lead a moment later."""
    alive: set[int] = set()
    for line in sys.stdin:
        pid = int(line[1:])
        (alive.add if line.startswith("+") else alive.discard)(pid)
    for pid in alive:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)  # helpers that tidy up after their parent, such as the tracker of shared memory, do so now
    for pid in alive:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
