"""What a device is, asked once per device and only when a call needs it: the one place that queries hardware."""

import functools
import importlib.util
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Hardware:
    """The facts that schedules depend on.

    device_type            torch's name of the device type: "cpu", "cuda", "xpu", ...
    backend                what kernels are compiled for: "cpu", "cuda" (NVIDIA), "hip" (AMD), else the device type
    capability             compute capability (major, minor) on "cuda", else (0, 0)
    num_sms                streaming multiprocessors (compute units on AMD), 0 where torch does not tell
    shared_memory_bytes    largest shared memory of one thread block, 0 where torch does not tell
    name                   the vendor's name of the device
    has_triton             whether Triton is installed for this Python
    """

    device_type: str
    backend: str
    capability: tuple[int, int] = (0, 0)
    num_sms: int = 0
    shared_memory_bytes: int = 0
    name: str = ""
    has_triton: bool = True

    def hopper_limit(self) -> str | None:
        """None where kernels in Gluon for Hopper run, else the reason why they do not."""
        if self.backend != "cuda" or self.capability != (9, 0):
            return f"it needs compute capability 9.0 (Hopper), the device is {self._describe()}"
        return None if self.has_triton else "Triton is not installed"

    def tma_limit(self) -> str | None:
        """None where kernels in Gluon with TMA and mma.sync run, else the reason why they do not."""
        if self.backend != "cuda" or self.capability[0] not in (9, 12):
            return f"it needs compute capability 9.0 or 12.x, the device is {self._describe()}"
        return None if self.has_triton else "Triton is not installed"

    def triton_limit(self) -> str | None:
        """None where kernels in plain Triton run, else the reason why they do not."""
        if self.device_type in ("cpu", "meta", "mps"):
            return f"Triton has no compiler for {self.device_type} tensors"
        if not self.has_triton:
            return "Triton is not installed"
        if self.backend == "cuda" and self.capability < (8, 0):
            return f"it needs compute capability 8.0 or newer, the device is {self._describe()}"
        return None

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel may be on the device before the one in front of it has ended, and wait there."""
        return self.backend == "cuda" and self.capability >= (9, 0)

    def _describe(self) -> str:
        if self.backend != "cuda":
            return self.name or self.backend
        return f"{self.name} with {self.capability[0]}.{self.capability[1]}"


def hardware_of(device: torch.device | str) -> Hardware:
    """Describes `device`; "cuda" without an index is the current device. The first call per device queries the
    driver."""
    device = torch.device(device)
    if device.type == "cpu" or device.type == "meta":
        return _host(device.type)
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" else 0
    return _accelerator(device.type, index)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _host(device_type: str) -> Hardware:
    return Hardware(device_type, backend=device_type, name=device_type, has_triton=_has_triton())


@functools.cache
def _accelerator(device_type: str, index: int) -> Hardware:
    if device_type != "cuda":
        return Hardware(device_type, backend=device_type, name=f"{device_type}:{index}", has_triton=_has_triton())
    properties = torch.cuda.get_device_properties(index)
    is_hip = torch.version.hip is not None
    return Hardware(
        device_type,
        backend="hip" if is_hip else "cuda",
        capability=(0, 0) if is_hip else (properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        shared_memory_bytes=getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        name=properties.name,
        has_triton=_has_triton(),
    )
