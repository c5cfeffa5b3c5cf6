"""What every test gets: skips that say what is missing, a seed, NaN in uninitialised GPU memory; and the GPU record."""

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from tests import gpu_record


def pytest_addoption(parser: pytest.Parser) -> None:
    gpu_record.add_option(parser)
    parser.addoption("--part", default="0/1", metavar="I/N", help="only every N-th test, from the I-th on")


def pytest_configure(config: pytest.Config) -> None:
    gpu_record.register(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Neighbours, which take about as long, are in different parts.
    first, num_parts = map(int, config.getoption("--part").split("/"))
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % num_parts != first])
    items[:] = items[first::num_parts]
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("gpu") and num_devices < 1:
            item.add_marker(pytest.mark.skip(reason="no CUDA device, or a torch without CUDA"))
        if item.get_closest_marker("multi_gpu") and num_devices < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA devices, found {num_devices}"))
    # Slow tests first: where tests run in parallel, the others fill the time meanwhile.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """An illegal access ends the CUDA context of its process: every later GPU test would fail, and hide which it was.

    Under pytest-xdist the worker ends and is replaced, at the price of one more test; else the run ends.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            time.sleep(0.5)  # the report of this test is on its way to the controller
            os._exit(3)
        pytest.exit(f"the CUDA context is lost after {nodeid}: {error}", returncode=3)


@pytest.fixture(autouse=True)
def large_memory_is_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers share the GPU's memory: what one keeps cached, the others lack."""
    yield
    if request.node.get_closest_marker("xdist_group") and torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, torch.empty and its kin give NaN, so that an output that a kernel forgets to write fails its test.

    Torch's own switch for this works only with deterministic algorithms, which would change what is tested.
    """
    if request.node.get_closest_marker("gpu") is None and request.node.get_closest_marker("multi_gpu") is None:
        return
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, _filled_with_nan(getattr(owner, name)))


def _filled_with_nan(allocate):
    def allocate_nan(*arguments, **options):
        tensor = allocate(*arguments, **options)
        if tensor.is_cuda and tensor.is_floating_point() and not torch.cuda.is_current_stream_capturing():
            tensor.detach().fill_(float("nan"))  # a new parameter may require a gradient already
        return tensor

    return allocate_nan


@pytest.fixture
def sync_is_an_error() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context in which torch raises where the host would wait for the GPU; the mode before it is always restored."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*prototype feature", UserWarning)
            try:
                torch.cuda.set_sync_debug_mode("error")
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    return context
