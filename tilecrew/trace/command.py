"""`tilecrew trace PIPELINE`. Nothing heavy is imported until the command runs."""

import importlib
import re
from pathlib import Path
from typing import Annotated, Any

PIPELINES = ("scan", "roles")


def add_trace(app: Any) -> None:
    """Adds the command to the typer application."""
    import typer

    @app.command()
    def trace(
        pipeline: Annotated[str, typer.Argument(help="scan or roles: the chunked gated delta rule's pipelines.")],
        tokens: Annotated[int, typer.Option(min=1, help="Tokens of the one sequence.")] = 4096,
        query_heads: Annotated[int, typer.Option(min=1, help="Heads of queries and keys.")] = 2,
        value_heads: Annotated[int, typer.Option(min=1, help="Heads of values.")] = 8,
        block_v: Annotated[
            int | None, typer.Option(help="Values of a program. (default: 64 for scan, 128 for roles)")
        ] = None,
        chunks: Annotated[str, typer.Option(help="FIRST:BEHIND, the chunks that the picture shows.")] = "4:8",
        program: Annotated[int, typer.Option(min=0, help="The program (CTA) that is shown.")] = 0,
        output: Annotated[Path, typer.Option(help="Folder for trace.json and trace.png.")] = Path("trace-output"),
    ) -> None:
        """Measure when the roles of one CTA load, compute, wait and store: a Chrome trace, a picture and a table.

        Exit code 1 where the trace is incomplete, 2 where something is missing or not known.
        """
        from rich.console import Console

        console = Console()

        def refuse(message: str) -> typer.Exit:
            console.print(message, markup=False, highlight=False, soft_wrap=True)
            return typer.Exit(2)

        if pipeline not in PIPELINES:
            raise refuse(f"PIPELINE must be one of {', '.join(PIPELINES)}, got {pipeline!r}")
        bounds = re.fullmatch(r"(\d+):(\d+)", chunks)
        if bounds is None:
            raise refuse(f"--chunks must be FIRST:BEHIND, such as 4:8, got {chunks!r}")
        run = importlib.import_module("tilecrew.trace.run")
        settings = run.Settings(
            pipeline=pipeline,
            block_v=run.BLOCKS_V[pipeline][0] if block_v is None else block_v,
            tokens=tokens,
            query_heads=query_heads,
            value_heads=value_heads,
            chunks=(int(bounds[1]), int(bounds[2])),
            program=program,
            output=output,
        )
        try:
            run.require(settings)
        except ValueError as error:
            raise refuse(str(error)) from None
        limit = run.why_not()
        if limit is not None:
            raise refuse(f"tilecrew trace cannot run: {limit}")
        if not run.run_trace(settings, console):
            raise typer.Exit(1)
