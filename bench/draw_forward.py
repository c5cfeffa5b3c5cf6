"""Draws the forward rows of a record of bench/gated_delta_rule.py; needs the extra `cli`, and no GPU.

PYTHONPATH=. python bench/draw_forward.py bench/results/gated_delta_rule.json docs/pictures/forward.png
"""

import json
import sys
from pathlib import Path

from tilecrew.benchmark import report
from tilecrew.benchmark.measure import Row


def main() -> int:
    if len(sys.argv) != 3:
        print("draw_forward.py RECORD PICTURE", file=sys.stderr)
        return 2
    record = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    subtitle = f"{record['device']}, {record['dtype']}, captured graphs; {versions}"
    report.draw([Row(**row) for row in record["rows"]], subtitle, Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
