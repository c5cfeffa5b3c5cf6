"""What the tests of several processes share: places that few of them may hold at a time."""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SECONDS_BETWEEN_TRIES = 0.2


@contextlib.contextmanager
def one_of(number: int, name: str, folder: Path | None = None) -> Iterator[int]:
    """Holds one of `number` places of that name, waiting until one is free, and says which: locks on files of this user
    in a folder, so that the place of a process that ends in any way is free again."""
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    prefix = f"tilecrew-tests-{os.getuid()}-{name.replace(' ', '-')}"
    while True:
        for place in range(number):
            with open(folder / f"{prefix}-{place}", "w") as file:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield place
                    return
        time.sleep(SECONDS_BETWEEN_TRIES)
