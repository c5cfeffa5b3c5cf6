"""The demo command, step by step: build, check against transformers, measure, draw."""

import json
import os
import platform
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Nothing may be fetched, and transformers' own functions are the ones to compare with. Read by these libraries when
# they are imported.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", USE_HUB_KERNELS="NO")
# flash-linear-attention, where installed, is imported by transformers and warns about machines without a GPU. The demo
# does not use it.
warnings.filterwarnings("ignore", message="Triton is not supported on current platform")

import torch  # noqa: E402
import transformers  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402

import tilecrew  # noqa: E402
from tilecrew._hardware import hardware_of  # noqa: E402
from tilecrew.demo.agreement import HALF_FACTOR, Check, Run, check_agreement  # noqa: E402
from tilecrew.demo.model import (  # noqa: E402
    CPU_SIZE,
    GPU_SIZE,
    HEAD_DIM,
    ModelSize,
    build_model,
    read_text,
    token_ids,
    train_tokenizer,
)
from tilecrew.demo.picture import draw  # noqa: E402
from tilecrew.demo.ranks import NUM_PROCESSES, ProcessesError, check_ranks, prompt_lengths  # noqa: E402
from tilecrew.demo.timing import Timing, measure, operator_inputs, speed_up  # noqa: E402
from tilecrew.gated_delta_rule.schedule import Problem, pick_recurrent  # noqa: E402

if TYPE_CHECKING:
    from tokenizers import ByteLevelBPETokenizer

SHORTEST_PROMPT = 128


@dataclass(frozen=True)
class Settings:
    """What the command line sets.

    device          where the model runs: "cpu" or "cuda"
    output          folder for demo.png and demo.json
    prompt_tokens   tokens of the prompt whose logits are compared
    new_tokens      compared decode steps
    max_tokens      longest measured prompt; the others are its halves, down to 128
    repeats         measured runs per point
    """

    device: torch.device
    output: Path
    prompt_tokens: int = 600
    new_tokens: int = 16
    max_tokens: int = 4096
    repeats: int = 3

    @property
    def lengths(self) -> list[int]:
        """The measured prompt lengths, ascending."""
        lengths = [self.max_tokens]
        while lengths[-1] // 2 >= SHORTEST_PROMPT:
            lengths.append(lengths[-1] // 2)
        return sorted(lengths)


def run_demo(settings: Settings, console: Console) -> bool:
    """Runs everything and prints it. Returns whether the logits agree; nothing is measured where they do not."""
    transformers.logging.set_verbosity_error()
    is_gpu = settings.device.type == "cuda"
    size, dtype = (GPU_SIZE, torch.bfloat16) if is_gpu else (CPU_SIZE, torch.float32)
    with _progress(console) as progress:
        task = progress.add_task("building tokenizer and model", total=2)
        text = read_text()
        tokenizer = train_tokenizer(text)
        progress.advance(task)
        model = build_model(size, dtype, settings.device)
        progress.advance(task)
        prompt = token_ids(tokenizer, text, settings.prompt_tokens, settings.device)

        task = progress.add_task("comparing logits of both paths", total=1)
        checks, run = check_agreement(model, prompt, settings.new_tokens)
        progress.advance(task)

        spread_checks: list[Check] = []
        if all(check.agrees for check in checks) and torch.distributed.is_available():
            task = progress.add_task(f"again, experts on {NUM_PROCESSES} processes", total=1)
            try:
                spread_checks = check_ranks(CPU_SIZE, prompt[0].tolist(), settings.new_tokens)
            except ProcessesError as error:
                console.print(f"experts on {NUM_PROCESSES} processes failed: {error}", markup=False, highlight=False)
                return False
            progress.advance(task)

    _print_setup(console, settings, model, size, dtype)
    agrees = _print_agreement(console, checks, spread_checks, dtype, settings)
    _print_decoded(console, tokenizer, run)
    if not agrees:
        return False

    prompts = [token_ids(tokenizer, text, num_tokens, settings.device) for num_tokens in settings.lengths]
    with _progress(console) as progress:
        task = progress.add_task("measuring prefill", total=2 * len(prompts))
        timings = measure(model, size, prompts, settings.repeats, lambda: progress.advance(task))
    _print_timings(console, timings)
    longest = max(timing.num_tokens for timing in timings)
    if longest < settings.max_tokens:
        console.print(f"Prompts longer than {longest:,} tokens were left out: this machine is slow, or busy.")

    settings.output.mkdir(parents=True, exist_ok=True)
    picture = settings.output / "demo.png"
    draw(timings, f"{_where(settings.device)}, {_name(dtype)}; {_describe(size)}", picture)
    (settings.output / "demo.json").write_text(
        json.dumps(_record(settings, dtype, checks + spread_checks, timings), indent=2) + "\n"
    )
    console.print(f"picture: {picture}\nnumbers: {settings.output / 'demo.json'}", highlight=False)
    return True


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:<34}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True)


def _print_setup(console: Console, settings: Settings, model: Any, size: ModelSize, dtype: torch.dtype) -> None:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    q, k, v, g, beta = operator_inputs(size, settings.prompt_tokens, dtype, settings.device)
    prefill = tilecrew.explain_chunk_gated_delta_rule(q.contiguous(), k.contiguous(), v.contiguous(), g, beta)
    problem = Problem(1, 1, 1, size.num_key_heads, size.num_value_heads, HEAD_DIM, HEAD_DIM, _name(dtype))
    decode = pick_recurrent(problem, hardware_of(settings.device))
    table = Table(title="What runs", title_justify="left", show_header=False)
    table.add_row("model", f"Qwen3-Next, random weights, {parameters / 1e6:.1f} million parameters, {_name(dtype)}")
    table.add_row("layers", _describe(size))
    table.add_row("device", _where(settings.device))
    table.add_row("prefill served by", f"[bold]{prefill.implementation}[/bold]: {prefill.reason}")
    table.add_row("decode served by", f"[bold]{decode.implementation}[/bold]: {decode.reason}")
    table.add_row("compared with", f"transformers {transformers.__version__}, its torch functions")
    console.print(table)


def _print_agreement(
    console: Console, checks: list[Check], spread_checks: list[Check], dtype: torch.dtype, settings: Settings
) -> bool:
    table = Table(title="Logits, tilecrew against transformers", title_justify="left")
    table.add_column("call")
    table.add_column("relative error", justify="right")
    table.add_column("allowed", justify="right")
    table.add_column("")
    for check in _shown(checks) + spread_checks:
        verdict = "[green]agrees[/green]" if check.agrees else "[bold red]disagrees[/bold red]"
        table.add_row(check.name, f"{check.error:.1e}", f"{check.allowed:.0e}", verdict)
    console.print(table)
    console.print(
        f"Compared: a prompt of {settings.prompt_tokens} tokens and {settings.new_tokens} decode steps on the same "
        f"tokens. The error is |tilecrew - transformers| / |transformers| over all logits. {_tolerance_reason(dtype)}"
    )
    if spread_checks:
        lengths = ", ".join(str(length) for length in prompt_lengths(settings.prompt_tokens))
        console.print(
            f"Then {NUM_PROCESSES} processes on the CPU, in float32, each with its part of the experts and a prompt of "
            f"its own ({lengths} tokens): the largest error of all. Tokens travel to experts through shared memory."
        )
    elif all(check.agrees for check in checks):
        console.print("Experts on several processes were left out: this torch has no torch.distributed.")
    agrees = all(check.agrees for check in checks + spread_checks)
    if not agrees:
        console.print("[bold red]The logits disagree: the measurements are left out.[/bold red]")
    return agrees


def _print_decoded(console: Console, tokenizer: "ByteLevelBPETokenizer", run: Run) -> None:
    if run.tokens:
        text = repr(tokenizer.decode(run.tokens))
        console.print(f"decoded (random weights, so it means nothing): {text}", highlight=False, markup=False)


def _shown(checks: list[Check]) -> list[Check]:
    """Prefill, the decode step with the largest error, the last, and what disagrees: not each step of a long list."""
    prefill, *decode = checks
    wrong = [check for check in decode if not check.agrees]
    chosen = {check.name for check in [*wrong[:8], *decode[-1:], *sorted(decode, key=lambda check: -check.error)[:1]]}
    return [prefill, *(check for check in decode if check.name in chosen)]


def _tolerance_reason(dtype: torch.dtype) -> str:
    if dtype == torch.float32:
        return "Both paths compute in float32 in another order, which moves logits by about one part in a million."
    return (
        f"Each path rounds to {_name(dtype)} in its own places, and that can send a token to another expert: allowed "
        f"is {HALF_FACTOR:g} times what transformers in {_name(dtype)} differs from transformers in float32."
    )


def _print_timings(console: Console, timings: list[Timing]) -> None:
    for what, title in (("operator", "Gated delta rule of one layer"), ("model", "Prefill of the whole model")):
        table = Table(title=f"{title}, milliseconds", title_justify="left")
        for name in ("tokens", "tilecrew", "transformers", "ratio"):
            table.add_column(name, justify="right")
        by_key = {(t.path, t.num_tokens): t.milliseconds for t in timings if t.what == what}
        for num_tokens, ratio in speed_up(timings, what):
            ours, theirs = by_key["tilecrew", num_tokens], by_key["transformers", num_tokens]
            table.add_row(f"{num_tokens:,}", f"{ours:.2f}", f"{theirs:.2f}", f"{ratio:.2f}")
        console.print(table)


def _record(settings: Settings, dtype: torch.dtype, checks: list[Check], timings: list[Timing]) -> dict[str, Any]:
    return {
        "device": _where(settings.device),
        "dtype": _name(dtype),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tilecrew": tilecrew.__version__,
        "repeats": settings.repeats,
        "checks": [asdict(check) for check in checks],
        "timings": [asdict(timing) for timing in timings],
    }


def _where(device: torch.device) -> str:
    if device.type == "cuda":
        return hardware_of(device).name
    num_threads = torch.get_num_threads()
    return f"CPU ({platform.machine()}), {num_threads} thread{'s' if num_threads > 1 else ''}"


def _describe(size: ModelSize) -> str:
    num_full = size.num_layers // 4
    return (
        f"{size.num_layers - num_full} Gated DeltaNet layers ({size.num_key_heads} key and {size.num_value_heads} "
        f"value heads of {HEAD_DIM}), {num_full} of full attention, 8 experts"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
