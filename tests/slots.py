"""What the tests of several processes share: places that few of them may hold at a time."""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SECONDS_BETWEEN_TRIES = 0.2
LONGEST_WAIT_SECONDS = 7200.0


@contextlib.contextmanager
def one_of(
    number: int, name: str, folder: Path | None = None, limit_seconds: float = LONGEST_WAIT_SECONDS
) -> Iterator[int]:
    """Holds one of `number` places of that name, waiting until one is free, and says which: locks on files of this user
    in a folder, so that the place of a process that ends in any way is free again. Raises TimeoutError where none has
    been free for limit_seconds."""
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    prefix = f"tilecrew-tests-{os.getuid()}-{name.replace(' ', '-')}"
    deadline = time.monotonic() + limit_seconds
    while True:
        for place in range(number):
            with open(folder / f"{prefix}-{place}", "w") as file:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield place
                    return
        if time.monotonic() > deadline:
            raise TimeoutError(f"none of {number} places of {name!r} was free for {limit_seconds} s")
        time.sleep(SECONDS_BETWEEN_TRIES)
