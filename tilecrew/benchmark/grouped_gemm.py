"""`tilecrew bench grouped-gemm`: the grouped GEMM beside torch's and beside one dense product of as many operations.

Large shapes with skewed groups, of whole blocks of 128 rows and of any number, and few rows over 128 groups, where
reading the weights is what takes time; with weights of both layouts, and with notifications, which wait for the stores
of every tile and always have tiles of 128 rows. On a GPU calls are captured in CUDA graphs; the graphs of a shape run
in turns, so that all meet the same temperature and power, with the L2 cache flushed before each. A result whose error
against float64, on sampled rows, is too large gets no time.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tilecrew
from tilecrew._hardware import hardware_of
from tilecrew.benchmark.timing import in_turn
from tilecrew.grouped_gemm import NotifyRowBlock, max_row_blocks

OURS, TRANSPOSED, NOTIFYING = "tilecrew", "tilecrew transposed", "tilecrew notifying"
TORCH, DENSE = "torch._grouped_mm", "dense"
# Norm of the difference over the norm of the truth, largest over rows.
LARGEST_ERROR = {torch.bfloat16: 4e-3, torch.float32: 1e-5}
COPY_BYTES_PER_SECOND = 4.27e12  # of an H200, measured
SAMPLED_ROWS = 64
ROW_BLOCK = 128  # rows of a tile


@dataclass(frozen=True)
class Shape:
    """E groups, M rows, K inner size, N columns. whole_blocks: the rows of every group are a multiple of 128."""

    num_groups: int
    num_rows: int
    num_inner: int
    num_columns: int
    whole_blocks: bool = False

    def __str__(self) -> str:
        sizes = f"E {self.num_groups} M {self.num_rows} K {self.num_inner} N {self.num_columns}"
        return sizes + (", whole blocks" if self.whole_blocks else "")


SIZES = [
    (8, 16384, 7168, 4096),
    (32, 16384, 7168, 4096),
    (32, 16384, 2048, 7168),
    (64, 32768, 2048, 1536),
    (128, 32768, 2048, 1536),
]
LARGE = [Shape(*sizes, whole_blocks) for whole_blocks in (True, False) for sizes in SIZES]
FEW_ROWS = [Shape(128, num_rows, 2048, 1536) for num_rows in (1, 4, 16, 64, 128, 256, 1024, 4096)]
CASES = {
    "targets": [*LARGE, *FEW_ROWS],
    "large": LARGE,
    "few-rows": FEW_ROWS,
    "small": [Shape(4, 256, 64, 128), Shape(8, 5, 64, 128)],
}


@dataclass(frozen=True)
class Row:
    """One implementation on one shape. milliseconds: None where refused, with the reason; error: relative, of sampled
    rows; chosen: what tilecrew's schedule took, with its reason, "" for others; ratios: time of the dense product, and
    of torch's grouped GEMM, over this one's."""

    shape: Shape
    name: str
    chosen: str
    milliseconds: float | None
    teraflops: float | None
    share_of_copy_rate: float | None
    ratio_to_dense: float | None
    ratio_to_torch: float | None
    error: float
    refused: str


def lengths_of(shape: Shape) -> torch.Tensor:
    """Rows of each group: skewed; few rows go to random groups."""
    generator = torch.Generator().manual_seed(0)
    block = ROW_BLOCK if shape.whole_blocks else 1
    if shape.num_rows < 64 * shape.num_groups:
        groups = torch.randint(0, shape.num_groups, (shape.num_rows,), generator=generator)
        return torch.bincount(groups, minlength=shape.num_groups)
    shares = torch.rand(shape.num_groups, generator=generator) + 0.2
    lengths = (shares / shares.sum() * (shape.num_rows // block)).long() * block
    lengths[: int(shape.num_rows - lengths.sum()) // block] += block  # what rounding left over
    return lengths


def variants_of(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """The calls that are compared; each multiplies [M, K] rows."""
    transposed = w.transpose(1, 2).contiguous().transpose(1, 2)
    dense = w[0].contiguous()
    notify = NotifyRowBlock(offs.new_zeros(max_row_blocks(x.shape[0], w.shape[0])))
    return {
        OURS: lambda: tilecrew.grouped_gemm(x, w, offs),
        TRANSPOSED: lambda: tilecrew.grouped_gemm(x, transposed, offs),
        NOTIFYING: lambda: tilecrew.grouped_gemm(x, w, offs, epilogue=notify),
        TORCH: lambda: torch._grouped_mm(x, w, offs=offs),
        DENSE: lambda: x @ dense,
    }


def error_of(result: torch.Tensor, x: torch.Tensor, w: torch.Tensor, groups: torch.Tensor) -> float:
    """Of rows that are spread over the groups, relative to float64; NaN anywhere gives NaN. groups: of each row."""
    if not bool(result.isfinite().all()):
        return float("nan")
    rows = torch.linspace(0, len(groups) - 1, min(SAMPLED_ROWS, len(groups))).long()
    wanted = torch.stack([x[row].double() @ w[int(groups[row])].double() for row in rows.tolist()])
    actual = result[rows.to(result.device)].double()
    return float(((actual - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


def measure(shape: Shape, device: torch.device, seconds: float) -> list[Row]:
    """A row for each variant. seconds: spent on timing, at most, but at least three rounds."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    x = torch.randn(shape.num_rows, shape.num_inner, **options)
    w = torch.empty(shape.num_groups, shape.num_inner, shape.num_columns, **options).normal_(std=shape.num_inner**-0.5)
    lengths = lengths_of(shape)
    offs = lengths.cumsum(0).to(device, torch.int32)
    groups = torch.repeat_interleave(torch.arange(shape.num_groups), lengths)
    variants = variants_of(x, w, offs)
    runs: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, call in variants.items():
        try:
            errors[name] = error_of(call(), x, w, torch.zeros_like(groups) if name == DENSE else groups)
            if not errors[name] <= LARGEST_ERROR[dtype]:
                raise AssertionError(f"error {errors[name]:.1e} is above {LARGEST_ERROR[dtype]:.0e}")
            runs[name] = _captured(call) if device.type == "cuda" else call
        except Exception as error:  # a refusal is a result, and the other variants are still of use
            refused[name] = f"{type(error).__name__}: {error}"[:500]
    times = in_turn(runs, device, seconds)
    used = w[(lengths > 0).to(device)].numel()
    num_bytes = x.element_size() * (x.numel() + used + shape.num_rows * shape.num_columns)
    flops = 2 * shape.num_rows * shape.num_inner * shape.num_columns
    chosen = str(tilecrew.explain_grouped_gemm(x, w, offs))
    is_known = hardware_of(device).name == "NVIDIA H200"

    def row(name: str) -> Row:
        value = times.get(name)
        return Row(
            shape,
            name,
            chosen if name == OURS else "",
            value,
            None if value is None else 1e-9 * flops / value,
            1e3 * num_bytes / value / COPY_BYTES_PER_SECOND if value is not None and is_known else None,
            times[DENSE] / value if value is not None and DENSE in times else None,
            times[TORCH] / value if value is not None and TORCH in times else None,
            errors.get(name, float("nan")),
            refused.get(name, ""),
        )

    return [row(name) for name in variants]


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def lines_of(rows: list[Row]) -> list[str]:
    """One shape as text."""
    lines = [f"{rows[0].shape}  ({next(row.chosen for row in rows if row.name == OURS)})"]
    for row in rows:
        if row.milliseconds is None:
            lines.append(f"    {row.name:20} REFUSED {row.refused}")
            continue
        parts = [f"    {row.name:20} {row.milliseconds:9.4f} ms {row.teraflops:7.1f} TFLOP/s"]
        for ratio, other in ((row.ratio_to_dense, "dense"), (row.ratio_to_torch, "torch")):
            parts.append(" " * 14 if ratio is None else f"{ratio:6.2f} x {other}")
        if row.share_of_copy_rate is not None:
            parts.append(f"{100 * row.share_of_copy_rate:5.1f} % of copy rate")
        lines.append("  ".join([*parts, f"error {row.error:.1e}"]))
    return lines


@torch.inference_mode()
def run_benchmark(
    cases: str, device: torch.device, seconds: float, path: Path | None, say: Callable[[str], None]
) -> bool:
    """Measures, says every shape as text, and writes the record after each; False where a result of ours was refused,
    or a shape left out. seconds: of all shapes together; when they are over no further shape is begun. Raises
    ValueError for unknown cases."""
    if cases not in CASES:
        raise ValueError(f"--cases must be one of {', '.join(CASES)}, got {cases!r}")
    torch.manual_seed(0)
    begin, rows, skipped = time.monotonic(), list[Row](), list[Shape]()
    setting = {"device": hardware_of(device).name, "torch": torch.__version__, "tilecrew": tilecrew.__version__}
    say(", ".join(f"{name} {value}" for name, value in setting.items()))
    for number, shape in enumerate(CASES[cases]):
        left = seconds - (time.monotonic() - begin)
        if left <= 0:
            skipped.append(shape)
            say(f"{shape}: no time left")
        else:
            measured = measure(shape, device, min(2.0, left / (len(CASES[cases]) - number)))
            rows += measured
            for line in lines_of(measured):
                say(line)
        if path is not None:
            record = {**setting, "rows": [dataclasses.asdict(row) for row in rows], "skipped": [*map(str, skipped)]}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if path is not None:
        say(f"written: {path}")
    return not skipped and not any(row.refused for row in rows if row.name.startswith(OURS))
