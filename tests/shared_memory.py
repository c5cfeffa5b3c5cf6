"""NaN in the shared memory of every SM: a kernel that reads what it has not written gets it, as it may get anything."""

import torch

from tilecrew.device.compat import gl, gluon
from tilecrew.device.mma import vector_layout

NUM_FLOATS = gl.constexpr(1024)
NUM_TILES = gl.constexpr(56)  # of 4 KiB: 224 of the 227 KiB that a block can have


@gluon.jit
def fill_kernel(out, num_warps: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    tiles = gl.allocate_shared_memory(gl.float32, [NUM_TILES, NUM_FLOATS], vector_layout())
    nan = gl.full([NUM_FLOATS], float("nan"), gl.float32, layout)
    for i in range(NUM_TILES):
        tiles.index(i).store(nan)
    # A value that comes from the tiles, or the compiler would see that nobody reads them.
    values = tiles.index(gl.program_id(0) % NUM_TILES).load(layout)
    gl.store(out + gl.arange(0, NUM_FLOATS, layout), values)


def fill_with_nan() -> None:
    """On the current stream: several blocks for each SM, each of which takes all of its shared memory."""
    out = torch.zeros(NUM_FLOATS.value, device="cuda")
    num_programs = 4 * torch.cuda.get_device_properties(out.device).multi_processor_count
    fill_kernel[(num_programs,)](out, num_warps=4)
    assert out.isnan().all()
