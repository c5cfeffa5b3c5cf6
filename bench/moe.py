"""What `tilecrew bench moe` does, for machines without the packages of the command line, and for several GPUs:

PYTHONPATH=. python bench/moe.py --json moe.json --seconds 120            ranks emulated on one GPU
PYTHONPATH=. torchrun --nproc-per-node 8 bench/moe.py --json moe.json     a process and a GPU for each rank
"""

import argparse
import functools
import os
import sys
from pathlib import Path

# Emulated ranks have two streams each; CUDA reads this when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# Multicast is not used, and setting it up fails on hosts whose switches do not offer it. Read when torch is imported,
# and when NCCL starts.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist

from tilecrew.benchmark.moe import run_benchmark, settings_of
from tilecrew.benchmark.processes import Processes
from tilecrew.parallel import World


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--shapes", nargs="+", default=[], help="default: those of published models")
    parser.add_argument("--routing", choices=["uniform", "skewed", "both"], default="both")
    parser.add_argument("--ranks", nargs="+", default=[], help="numbers of emulated ranks; default: 1 2 4 8")
    parser.add_argument("--tokens", type=int, help="tokens of each rank; default: 1024")
    parser.add_argument(
        "--dispatch", choices=["warps", "blocks", "gather"], default="", help="default: as tilecrew chooses"
    )
    parser.add_argument("--combine", choices=["push", "pull"], default="", help="default: as tilecrew chooses")
    parser.add_argument("--num-comm-blocks", type=int, help="of a rank; default: as tilecrew chooses")
    parser.add_argument("--seconds", type=float, default=120.0, help="after this time no further case is begun")
    parser.add_argument("--json", type=Path, help="where to write the figures, after every case")
    return parser.parse_args()


def main() -> int:
    options = vars(parse())
    name = options.pop("device")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else torch.device(name)
    lists = {name: ",".join(options.pop(name)) for name in ("shapes", "ranks")}
    try:
        settings = settings_of(device, **options, **lists)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    say = functools.partial(print, flush=True)
    if "RANK" not in os.environ:
        return 0 if run_benchmark(settings, say) else 1
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with World.from_group(device=device.type) as world:
        is_good = run_benchmark(settings, say, Processes(world))
    dist.destroy_process_group()
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
