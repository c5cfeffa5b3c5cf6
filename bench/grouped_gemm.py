"""What `tilecrew bench grouped-gemm` does, for machines without the packages of the command line:

PYTHONPATH=. python bench/grouped_gemm.py --json bench/results/grouped_gemm.json --seconds 50
"""

import argparse
import functools
import sys
from pathlib import Path

import torch

from tilecrew.benchmark.grouped_gemm import CASES, run_benchmark


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", choices=CASES, default="targets")
    parser.add_argument("--json", type=Path, help="where to write the figures, after every shape")
    parser.add_argument("--seconds", type=float, default=60.0, help="after this time no further shape is begun")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    say = functools.partial(print, flush=True)
    return 0 if run_benchmark(options.cases, torch.device("cuda"), options.seconds, options.json, say) else 1


if __name__ == "__main__":
    sys.exit(main())
