"""The command line: `tilecrew demo`, `bench`, `simulate`, `trace` and `doctor`. Without the extra `cli`, `main` says
what is missing."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tilecrew.trace.command import add_trace

if TYPE_CHECKING:
    import torch

INSTALL_HINT = "pip install 'tilecrew[cli,transformers]'"


def main() -> None:
    """The console script."""
    missing = [name for name in ("rich", "typer") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"tilecrew: the command line needs {' and '.join(missing)}; install them with: {INSTALL_HINT}")
    build_app()()


def build_app() -> Any:
    """The typer application."""
    import typer

    app = typer.Typer(
        name="tilecrew",
        help="Fused kernels for models that mix Gated DeltaNet layers with mixture-of-experts layers.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )

    @app.command()
    def demo(
        device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
        output: Annotated[Path, typer.Option(help="Folder for demo.png and demo.json.")] = Path("demo-output"),
        prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt whose logits are compared.")] = 600,
        new_tokens: Annotated[int, typer.Option(min=0, help="Compared decode steps.")] = 16,
        max_tokens: Annotated[
            int | None, typer.Option(min=1, help="Longest measured prompt. (default: 4096, on a GPU 16384)")
        ] = None,
        repeats: Annotated[int, typer.Option(min=1, help="Measured runs per point.")] = 3,
    ) -> None:
        """Run a small Qwen3-Next on tilecrew, check its logits against transformers, measure both, draw a picture.

        Exit code 1 where the logits disagree, 2 where something is missing.
        """
        from rich.console import Console

        console = Console()
        missing = [
            name for name in ("matplotlib", "tokenizers", "transformers") if importlib.util.find_spec(name) is None
        ]
        if missing:
            console.print(f"the demo needs {', '.join(missing)}; install with: {INSTALL_HINT}", markup=False)
            raise typer.Exit(2)
        try:
            chosen = choose_device(device)
        except ValueError as error:
            console.print(str(error), markup=False)
            raise typer.Exit(2) from None
        run = importlib.import_module("tilecrew.demo.run")
        settings = run.Settings(
            device=chosen,
            output=output,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            max_tokens=max_tokens or (16384 if chosen.type == "cuda" else 4096),
            repeats=repeats,
        )
        if not run.run_demo(settings, console):
            raise typer.Exit(1)

    add_bench(app)
    add_simulate(app)
    add_trace(app)

    @app.command()
    def doctor(
        ranks: Annotated[bool, typer.Option(help="Check memory and links between ranks, which takes a while.")] = True,
    ) -> None:
        """Show versions, the device, which implementations can run here and why not, the integrations, and check what
        ranks that work together rely on.

        Exit code 1 where a check fails.
        """
        from rich.console import Console

        console = Console()
        print_report(console)
        if ranks and not print_preflight(console):
            raise typer.Exit(1)

    return app


def add_bench(app: Any) -> None:
    """`tilecrew bench ...`, a group of commands."""
    import typer

    bench = typer.Typer(help="Measure beside other libraries, errors checked in the same run.", no_args_is_help=True)
    app.add_typer(bench, name="bench")

    @bench.command("gated-delta-rule")
    def bench_gated_delta_rule(
        peers: Annotated[
            str, typer.Option(help="Other libraries: 'installed', or names of flashqla, flashinfer, fla with commas.")
        ] = "installed",
        device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
        cases: Annotated[str, typer.Option(help="targets (the published sizes) or small.")] = "",
        output: Annotated[Path, typer.Option(help="Folder for the JSON, the table and the picture.")] = Path(
            "bench-output"
        ),
        seconds: Annotated[float, typer.Option(min=0.0, help="Time spent on each measured point.")] = 0.1,
    ) -> None:
        """Time forward and decode, in graphs and eagerly, beside other libraries and the hardware's floor.

        Exit code 1 where a result of tilecrew is wrong, 2 where something is missing.
        """
        from rich.console import Console

        console = Console()
        missing = [name for name in ("matplotlib",) if importlib.util.find_spec(name) is None]
        if missing:
            console.print(f"the benchmark needs {', '.join(missing)}; install with: {INSTALL_HINT}", markup=False)
            raise typer.Exit(2)
        run = importlib.import_module("tilecrew.benchmark.run")
        try:
            settings = run.settings_of(choose_device(device), cases, peers, output, seconds)
        except ValueError as error:
            console.print(str(error), markup=False)
            raise typer.Exit(2) from None
        if not run.run_benchmark(settings, console):
            raise typer.Exit(1)

    @bench.command("grouped-gemm")
    def bench_grouped_gemm(
        device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
        cases: Annotated[
            str, typer.Option(help="targets, its halves large and few-rows, or small. (default: targets on a GPU)")
        ] = "",
        json: Annotated[Path | None, typer.Option(help="Where to write the figures, after every shape.")] = None,
        seconds: Annotated[float, typer.Option(min=0.0, help="Of all shapes; then none is begun any more.")] = 120.0,
    ) -> None:
        """Time the grouped GEMM beside torch's, and beside one dense product of as many operations.

        Exit code 1 where a result of tilecrew is wrong or a shape was left out, 2 where something is missing.
        """
        from rich.console import Console

        console = Console()
        run = importlib.import_module("tilecrew.benchmark.grouped_gemm")
        try:
            chosen = choose_device(device)
            cases = cases or ("targets" if chosen.type == "cuda" else "small")
            is_good = run.run_benchmark(
                cases, chosen, seconds, json, lambda line: console.print(line, markup=False, soft_wrap=True)
            )
        except ValueError as error:
            console.print(str(error), markup=False)
            raise typer.Exit(2) from None
        if not is_good:
            raise typer.Exit(1)

    _add_bench_moe(bench)


def _add_bench_moe(bench: Any) -> None:
    import typer

    @bench.command("moe")
    def bench_moe(
        ranks: Annotated[
            str, typer.Option(help="Numbers of emulated ranks, with commas. (default: 1,2,4,8, on the CPU 1,2)")
        ] = "",
        shapes: Annotated[
            str, typer.Option(help="DeepSeek-V3, Qwen3-30B, Qwen3-Next, small. (default: the first three on a GPU)")
        ] = "",
        tokens: Annotated[int | None, typer.Option(help="Of each rank. (default: 1024, on the CPU 64)")] = None,
        routing: Annotated[str, typer.Option(help="uniform, skewed or both.")] = "both",
        dispatch: Annotated[str, typer.Option(help="warps, blocks or gather. (default: as tilecrew chooses)")] = "",
        combine: Annotated[str, typer.Option(help="push or pull. (default: as tilecrew chooses)")] = "",
        num_comm_blocks: Annotated[int | None, typer.Option(help="(default: as tilecrew chooses)")] = None,
        json: Annotated[Path | None, typer.Option(help="Where to write the figures, after every case.")] = None,
        seconds: Annotated[float, typer.Option(min=0.0, help="Of all cases; then none is begun any more.")] = 120.0,
        device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    ) -> None:
        """Time the expert-parallel mixture of experts on ranks emulated by one device, part by part, beside the same
        layer of torch's functions on one rank.

        Exit code 1 where a result is wrong or a case was left out, 2 where something is missing.
        """
        from rich.console import Console

        console = Console()
        # Emulated ranks have two streams each; CUDA reads this when it starts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        run = importlib.import_module("tilecrew.benchmark.moe")
        try:
            settings = run.settings_of(
                choose_device(device),
                shapes=shapes,
                routing=routing,
                ranks=ranks,
                tokens=tokens,
                dispatch=dispatch,
                combine=combine,
                num_comm_blocks=num_comm_blocks,
                seconds=seconds,
                json=json,
            )
        except ValueError as error:
            console.print(str(error), markup=False)
            raise typer.Exit(2) from None
        if not run.run_benchmark(settings, lambda line: console.print(line, markup=False, soft_wrap=True)):
            raise typer.Exit(1)


def add_simulate(app: Any) -> None:
    """`tilecrew simulate KERNEL`."""
    import typer

    @app.command()
    def simulate(
        kernel: Annotated[
            str, typer.Argument(help="prepare, prepare-gated, forward-roles, forward-scan or forward-scan-128.")
        ],
        seed: Annotated[int, typer.Option(help="Chooses the order of roles and asynchronous operations.")] = 0,
        timeline: Annotated[
            Path | None, typer.Option(help="PNG: what the roles of the first program do and wait for.")
        ] = None,
    ) -> None:
        """Run a compiled kernel on the CPU under one schedule, and say where its roles synchronise wrongly.

        Exit code 1 where it does, or where its result is wrong, 2 where something is missing or not known.
        """
        from rich.console import Console

        console = Console()
        needed = ("triton",) if timeline is None else ("triton", "matplotlib")
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            hint = f"pip install {' '.join(missing)}"
            console.print(f"the simulator needs {' and '.join(missing)}; install with: {hint}", markup=False)
            raise typer.Exit(2)
        kernels = importlib.import_module("tilecrew.simulator.kernels")
        if kernel not in kernels.KERNELS:
            known = ", ".join(kernels.KERNELS)
            console.print(f"KERNEL must be one of {known}, got {kernel!r}", markup=False)
            raise typer.Exit(2)
        if not simulate_kernel(kernel, seed, timeline, console):
            raise typer.Exit(1)


def simulate_kernel(kernel: str, seed: int, timeline: Path | None, console: Any) -> bool:
    """Simulates one of simulator.kernels.KERNELS, prints what came of it, draws its timeline; False where it is
    wrong."""
    from tilecrew.simulator import FaultError, kernels, run

    try:
        case = kernels.KERNELS[kernel]()
        events = run.simulate(case.launch, seed).events
    except FaultError as fault:
        console.print(f"{kernel}, seed {seed}: fault\n{fault}", markup=False, highlight=False, soft_wrap=True)
        return False
    steps: dict[int, int] = {}
    for event in events:
        steps[event.block] = max(steps.get(event.block, 0), event.end)
    error = case.error()
    lines = {
        "kernel": f"{kernel}, seed {seed}",
        "roles": ", ".join(run.role_names(case.launch)),
        "programs": f"{case.launch.num_programs}, {sum(steps.values())} steps in all",
        "relative error": f"{error:.1e}",
    }
    is_right = error <= kernels.LARGEST_ERROR
    if not is_right:
        lines["relative error"] += f", above {kernels.LARGEST_ERROR:.1e}"
    if timeline is not None:
        from tilecrew.simulator.timeline import draw

        timeline.parent.mkdir(parents=True, exist_ok=True)
        draw(events, f"{kernel}, seed {seed}, program 0", timeline)
        lines["timeline"] = str(timeline)
    for name, value in lines.items():
        console.print(f"{name:<16}{value}", markup=False, highlight=False, soft_wrap=True)
    return is_right


def choose_device(name: str) -> "torch.device":
    """The torch device for --device. Raises ValueError for an unknown name, and for cuda where there is none."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def print_report(console: Any) -> None:
    """What `tilecrew doctor` prints."""
    from rich.table import Table

    def table(title: str, *columns: str, rows: list[tuple[str, ...]]) -> None:
        drawn = Table(*columns, title=title, title_justify="left", show_header=len(columns) > 0)
        for row in rows:
            drawn.add_row(*row)
        console.print(drawn)

    device = choose_device("auto")
    table("Versions", rows=_versions())
    table("Device", rows=_device_facts(device))
    table("Gated delta rule here", "implementation", "problem", "runs", "why not", rows=_implementations(device))
    table("Integrations", "library", "available", "why not", rows=_integrations())


def print_preflight(console: Any) -> bool:
    """Runs the checks between ranks and prints them as a table; False where one fails."""
    from rich.markup import escape
    from rich.table import Table

    from tilecrew.parallel.preflight import run_preflight

    marks = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}
    drawn = Table("what", "right", "found", title="Ranks here", title_justify="left")
    is_right = True
    for check in run_preflight():
        is_right = is_right and check.is_right is not False
        drawn.add_row(check.name, marks[check.is_right], escape(check.detail))
    console.print(drawn)
    return is_right


def _versions() -> list[tuple[str, ...]]:
    packages = ("torch", "triton", "numpy", "transformers", "tokenizers", "flash-linear-attention", "matplotlib")
    import tilecrew

    rows: list[tuple[str, ...]] = [("tilecrew", tilecrew.__version__), ("python", platform.python_version())]
    for name in packages:
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def _device_facts(device: "torch.device") -> list[tuple[str, ...]]:
    from tilecrew._hardware import hardware_of

    hardware = hardware_of(device)
    rows: list[tuple[str, ...]] = [("name", hardware.name), ("backend", hardware.backend)]
    if hardware.backend == "cuda":
        rows.append(("compute capability", "{}.{}".format(*hardware.capability)))
    if hardware.num_sms:
        rows.append(("multiprocessors", str(hardware.num_sms)))
        rows.append(("shared memory of a block", f"{hardware.shared_memory_bytes // 1024} KiB"))
    return rows


def _implementations(device: "torch.device") -> list[tuple[str, ...]]:
    """One row per implementation and problem: Qwen3-Next's heads in bfloat16, with a gradient, and in float32."""
    from dataclasses import replace

    from tilecrew._hardware import hardware_of
    from tilecrew.gated_delta_rule.schedule import IMPLEMENTATIONS, RECURRENT_IMPLEMENTATIONS, Problem, supports

    heads = Problem(1, 4096, 1, num_heads=16, num_value_heads=32, key_dim=128, value_dim=128, dtype="bfloat16")
    problems = {
        "bfloat16": heads,
        "bfloat16, gradient": replace(heads, requires_gradient=True),
        "float32": replace(heads, dtype="float32"),
    }
    rows: list[tuple[str, ...]] = []
    for implementation in (*IMPLEMENTATIONS, *RECURRENT_IMPLEMENTATIONS):
        kind = "decode" if implementation in RECURRENT_IMPLEMENTATIONS else "prefill"
        for name, problem in problems.items():
            limit = supports(implementation, problem, hardware_of(device))
            answer = "[green]yes[/green]" if limit is None else "no"
            rows.append((f"{implementation} ({kind})", name, answer, limit or ""))
    return rows


def _integrations() -> list[tuple[str, ...]]:
    """Tries to switch each integration on, and off again."""
    rows: list[tuple[str, ...]] = []
    for name in ("transformers", "fla"):
        integration = importlib.import_module(f"tilecrew.integrations.{name}")
        try:
            with warnings.catch_warnings():
                # Where there is no GPU flash-linear-attention warns when it is imported; that is no news in this
                # report.
                warnings.simplefilter("ignore")
                integration.enable()
        except (ImportError, RuntimeError) as error:
            rows.append((name, "no", str(error)))
        else:
            integration.disable()
            rows.append((name, "[green]yes[/green]", ""))
    return rows
