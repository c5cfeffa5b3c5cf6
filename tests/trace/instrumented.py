"""Proton's instrumentation without a GPU: kernels are compiled as they are while a session is active."""

import contextlib
import re
from types import SimpleNamespace

from triton.profiler.hooks import InstrumentationHook
from triton.runtime import driver

from tilecrew.device.aot import SM90


@contextlib.contextmanager
def instrumentation(mode: str):
    """The hook of a session asks the driver for the target and its shared memory, which stands in here."""
    stand_in = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_target=lambda: SM90,
        utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 232_448}),
    )
    before = driver._active
    driver.set_active(stand_in)
    hook = InstrumentationHook(mode)
    hook.activate()
    try:
        yield
    finally:
        hook.deactivate()
        driver._active = before


def scopes_of(compiled) -> set[str]:
    """The names of scopes in a compiled kernel. Each is entered and left at as many places, which is asserted."""
    records = re.findall(r'proton\.record (start|end) "([^"]*)"', compiled.asm["ttgir"])
    entered = sorted(name for kind, name in records if kind == "start")
    assert entered == sorted(name for kind, name in records if kind == "end")
    assert len(re.findall(r"%clock\b", compiled.asm["ptx"])) == len(records)
    return set(entered)
