"""One launch of a pipeline under Proton's instrumentation, and the files and the table that come of it."""

import importlib
import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilecrew._hardware import hardware_of
from tilecrew.gated_delta_rule.schedule import HOPPER_CHUNK_SIZE, HOPPER_DIM
from tilecrew.testing import random_arguments
from tilecrew.trace import spans as trace_spans
from tilecrew.trace.spans import Span, TraceError

BLOCKS_V = {"scan": (64, 128), "roles": (128, 64, 32)}  # of the pipelines; the first is the default
WARM_UP_LAUNCHES = 20
# A record is 8 bytes, and a role makes two for each of its scopes: room for 16 scopes a chunk.
RECORD_BYTES_PER_CHUNK = 256
MAX_BUFFER_BYTES = 64 * 2**20  # of all programs together: what Proton copies at once
MAX_WARPS = 16  # of a program of these pipelines


@dataclass(frozen=True)
class Settings:
    """What is traced. chunks: first and behind the last that the picture shows. program: of the grid."""

    pipeline: str
    block_v: int
    tokens: int
    query_heads: int
    value_heads: int
    chunks: tuple[int, int]
    program: int
    output: Path

    @property
    def num_chunks(self) -> int:
        return -(-self.tokens // HOPPER_CHUNK_SIZE)

    @property
    def num_programs(self) -> int:
        return self.value_heads * (HOPPER_DIM // self.block_v)


def require(settings: Settings) -> None:
    """Raises ValueError where the settings cannot be traced."""
    if settings.block_v not in BLOCKS_V[settings.pipeline]:
        known = ", ".join(map(str, BLOCKS_V[settings.pipeline]))
        raise ValueError(f"--block-v must be one of {known} for {settings.pipeline}, got {settings.block_v}")
    if settings.value_heads % settings.query_heads != 0:
        raise ValueError(
            f"--value-heads must be a multiple of --query-heads {settings.query_heads}, got {settings.value_heads}"
        )
    first, behind = settings.chunks
    if not 0 <= first < behind <= settings.num_chunks:
        raise ValueError(f"--chunks must lie within 0:{settings.num_chunks}, got {first}:{behind}")
    if not 0 <= settings.program < settings.num_programs:
        raise ValueError(f"--program must be below {settings.num_programs}, got {settings.program}")
    if settings.num_programs * MAX_WARPS * _bytes_per_warp(settings.num_chunks) > MAX_BUFFER_BYTES:
        raise ValueError(
            f"{settings.num_programs} programs of {settings.num_chunks} chunks are more than Proton can record; "
            "take fewer --tokens or --value-heads"
        )


def why_not() -> str | None:
    """What is missing here for a trace, or None."""
    if importlib.util.find_spec("matplotlib") is None:
        return "it needs matplotlib; install with: pip install matplotlib"
    try:
        importlib.import_module("triton.profiler.language")
    except ImportError as error:
        return f"it needs Triton with its profiler, triton.profiler: {error}"
    if not torch.cuda.is_available():
        return "it measures on a GPU, and torch sees none here; `tilecrew simulate` needs none"
    hardware = hardware_of("cuda")
    if hardware.backend != "cuda" or hardware.capability != (9, 0):
        return f"the pipelines are kernels for Hopper (compute capability 9.0), this is a {hardware.name}"
    return None


def run_trace(settings: Settings, console: Any) -> bool:
    """Traces, writes trace.json and trace.png, prints the table. False, and says why, where the trace is incomplete."""
    settings.output.mkdir(parents=True, exist_ok=True)
    try:
        spans, kernel = trace(settings)
    except TraceError as error:
        console.print(f"the trace cannot be used: {error}", markup=False, highlight=False, soft_wrap=True)
        return False
    title = (
        f"{kernel}, V block {settings.block_v}, program {settings.program} of {settings.num_programs}, "
        f"{torch.cuda.get_device_name()}"
    )
    trace_spans.write_chrome(spans, title, settings.output / "trace.json")
    from tilecrew.trace.timeline import draw

    draw(spans, title, settings.output / "trace.png", settings.chunks)
    print_summary(spans, settings, console)
    return True


def print_summary(spans: list[Span], settings: Settings, console: Any) -> None:
    """What `tilecrew trace` prints: a row for each stage."""
    from rich.table import Table

    table = Table(title=f"{settings.pipeline}: median clock cycles over {settings.num_chunks} chunks")
    for name in ("role", "stage", "cycles", "chunk to chunk"):
        table.add_column(name, justify="left" if name in ("role", "stage") else "right")
    for row in trace_spans.summary(spans):
        table.add_row(row.role, row.stage, f"{row.cycles:.0f}", f"{row.period:.0f}")
    console.print(table)
    for name in ("trace.json", "trace.png"):
        console.print(str(settings.output / name), markup=False, highlight=False, soft_wrap=True)


def trace(settings: Settings) -> tuple[list[Span], str]:
    """The spans of one launch, and the kernel's name. Raises TraceError where spans are missing, and where the traced
    kernel computes other bits than the same kernel untraced."""
    launch, result = _launch(settings)
    launch.run()
    expected = result.o.clone()
    compiled = launch.kernel.warmup(*launch.args, grid=(launch.num_programs,), **launch.options)
    mode = profile_mode(compiled.metadata.num_warps, settings.num_chunks)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "proton.chrome_trace"
        _profile(launch, result.o, path, mode)
        if not path.exists():
            raise TraceError("Proton wrote no trace; is TRITON_PROTON_DISABLE set?")
        if not torch.equal(result.o, expected):
            raise TraceError("the traced kernel computed another result than the kernel without scopes")
        spans = trace_spans.read(path, settings.program, settings.num_chunks)
    return spans, launch.kernel.__name__


def profile_mode(num_warps: int, num_chunks: int) -> str:
    """Proton's mode: records of every warp in global memory, because the kernels leave no shared memory to spare.

    num_warps: of a program, all roles together. The clock of 32 bits costs fewer instructions; it wraps after seconds.
    """
    size = num_warps * _bytes_per_warp(num_chunks)
    return f"default:buffer_type=global:buffer_size={size}:optimizations=clock32"


def _bytes_per_warp(num_chunks: int) -> int:
    """Proton's buffers hold a power of 2 for each warp."""
    return 1 << (num_chunks * RECORD_BYTES_PER_CHUNK - 1).bit_length()


def _launch(settings: Settings) -> tuple[Any, Any]:
    """The pipeline's launch on a random problem, and where its result goes. The prepare kernel has run."""
    from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan, kernel_prepare

    arguments = random_arguments(
        1,
        settings.tokens,
        settings.query_heads,
        settings.value_heads,
        dtype=torch.bfloat16,
        device="cuda",
        output_final_state=True,
    )
    result = kernel_forward_roles.allocate_result(arguments)
    if settings.pipeline == "scan":
        prepared = kernel_prepare.run_gated(arguments, result.o)
        return kernel_forward_scan.launch(arguments, prepared, result, settings.block_v), result
    prepared = kernel_prepare.allocate(arguments)
    kernel_prepare.launch(arguments, prepared, result.o).run()
    return kernel_forward_roles.launch(arguments, prepared, result, settings.block_v), result


def _profile(launch: Any, output: torch.Tensor, path: Path, mode: str) -> None:
    """A Proton session with one launch of the instrumented kernel, written to `path`; `output` is that launch's.

    The kernel is compiled first; launches without instrumentation then warm up what the compiler's seconds let cool
    down: clocks, L2, page tables.
    """
    import triton.profiler as proton

    session = proton.start(str(path.with_suffix("")), data="trace", backend="instrumentation", mode=mode)
    try:
        launch.kernel.warmup(*launch.args, grid=(launch.num_programs,), **launch.options)
        proton.deactivate(session)
        for _ in range(WARM_UP_LAUNCHES):
            launch.run()
        output.fill_(float("nan"))
        torch.cuda.synchronize()
        proton.activate(session)
        launch.run()
        torch.cuda.synchronize()
    finally:
        proton.finalize(session)
