"""Triton's hash of its own compiler, made beside the import of the kernels.

Triton looks for a compiled kernel under a key that holds a hash of its library, which has 400 MB: a good part of what
the first call of a process takes where the kernels have been compiled before. It computes that once a process, when it
first launches. Hashing leaves Python to others, so that a thread can do it while modules are imported.
"""

import threading

import torch

_thread: threading.Thread | None = None


def start() -> None:
    """Starts to hash, where the process uses a GPU."""
    global _thread
    if torch.cuda.is_initialized():
        _thread = threading.Thread(target=_make, name="tilecrew compiler key", daemon=True)
        _thread.start()


def wait() -> None:
    """Until the hash is there: a launch in the meantime would compute it once more. For any number of threads."""
    if _thread is not None:  # and stays so, for another thread that is here
        _thread.join()


def _make() -> None:
    from triton.runtime import cache

    cache.triton_key()
