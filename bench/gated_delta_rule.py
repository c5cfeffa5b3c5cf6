"""What `tilecrew bench gated-delta-rule` measures, for machines without the packages of the command line:

PYTHONPATH=. python bench/gated_delta_rule.py --peers installed --json bench/results/gated_delta_rule.json
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from tilecrew.benchmark import report
from tilecrew.benchmark.measure import OURS, Row, measure_decode, measure_forward
from tilecrew.benchmark.run import setting_of, settings_of

OPERATORS = ["forward", "decode"]


def line_of(row: Row) -> str:
    times = " ".join(
        f"{name} {'-' if value is None else format(value, '.4f')}"
        for name, value in (("graph", row.graph_milliseconds), ("eager", row.eager_milliseconds))
    )
    name = f"{row.operator} {row.case}{', inside' if row.inside else ''}"
    return f"{name:32} {row.name:12} {times} ms, error {row.error:.1e} {row.refused or row.chosen}"


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="installed", help="'installed', or names with commas between")
    parser.add_argument("--cases", default="", choices=["", "targets", "small"])
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=OPERATORS)
    parser.add_argument("--json", type=Path, required=True, help="where to write the rows, after every case")
    parser.add_argument("--seconds", type=float, default=0.1, help="spent on each measured point")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no case is begun")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        settings = settings_of(device, options.cases, options.peers, options.json, options.seconds)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    problems = [(case, inside) for case in settings.forward for inside in (False, True)]
    problems = problems if "forward" in options.operators else []
    decode_cases = settings.decode if "decode" in options.operators else ()
    deadline, rows = time.monotonic() + options.limit, list[Row]()

    def keep(found: list[Row]) -> None:
        rows.extend(found)
        report.write_json(rows, setting_of(settings), options.json)
        print("\n".join(map(line_of, found)), flush=True)

    for case, inside in problems:
        if time.monotonic() < deadline:
            keep(measure_forward(case, inside, list(settings.peers), settings.dtype, device, options.seconds))
    for decode_case in decode_cases:
        if time.monotonic() < deadline:
            keep(measure_decode(decode_case, settings.dtype, device, options.seconds))
    return 1 if any(row.refused for row in rows if row.name == OURS) else 0


if __name__ == "__main__":
    sys.exit(main())
