"""Triton's NVIDIA driver on a machine without a GPU: its own launcher, on the fake CUDA library of fake_cuda.c."""

import ctypes
import os
import re
import struct
import subprocess
from pathlib import Path

import triton

CAPABILITY = (9, 0)


class FakeDriver:
    """Activates the fake driver in this process, which is then good for nothing else. folder: for the library.

    Device 0, and the stream `self.stream`.
    """

    def __init__(self, folder: Path, compiler: str) -> None:
        include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
        library = folder / "libcuda.so.1"
        source = Path(__file__).with_name("fake_cuda.c")
        options = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", f"-I{include}"]
        subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True, timeout=120)
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._described: set[int] = set()
        self.stream = 0x50
        self._activate()

    def _activate(self) -> None:
        # Imported behind the library, which these load.
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.driver import CudaDriver
        from triton.runtime import driver

        active = CudaDriver()
        active.get_device_capability = lambda device: CAPABILITY
        active.get_current_device = lambda: 0
        active.get_current_stream = lambda device: self.stream
        active.get_current_target = lambda: GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)
        driver.set_active(active)

    def describe(self, compiled) -> None:
        """Tells the library the parameters of a compiled kernel, so that its launches are logged with them."""
        if compiled.function in self._described:
            return
        self._described.add(compiled.function)
        sizes = parameter_sizes(compiled.asm["ptx"])
        self._library.fake_cuda_describe(
            ctypes.c_size_t(compiled.function), len(sizes), (ctypes.c_int * len(sizes))(*sizes)
        )

    def take_log(self) -> list[bytes]:
        """What was launched since the last call: per launch the function, sizes, the stream, and each parameter."""
        buffer = ctypes.create_string_buffer(1 << 20)
        length = self._library.fake_cuda_take_log(buffer)
        entries, position, content = [], 0, buffer.raw[:length]
        while position < length:
            (size,) = struct.unpack_from("i", content, position)
            entries.append(content[position + 4 : position + 4 + size])
            position += 4 + size
        return entries


def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel in a PTX module."""
    header = re.search(r"\.entry\s+\w+\((.*?)\)", ptx, re.DOTALL).group(1)
    sizes = []
    for line in header.split(","):
        bits, count = re.search(r"\.[busf](8|16|32|64)\b.*?(?:\[(\d+)\])?\s*$", line.strip()).groups()
        sizes.append(int(bits) // 8 * int(count or 1))
    return sizes
