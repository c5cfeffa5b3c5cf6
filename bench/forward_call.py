"""Three calls of the forward and nothing else, for a profiler, which skips the kernels of the first. A call has two of
them, or five where sequences are cut into pieces, as those of 1,32768,2,8 are:

ncu -k regex:'scan|prepare|pieces|states|combine' --launch-skip 2 --launch-count 2 --csv --page raw \
    --section SpeedOfLight --section WarpStateStats --section ComputeWorkloadAnalysis \
    --section MemoryWorkloadAnalysis --section Occupancy \
    --metrics l1tex__data_pipe_lsu_wavefronts.sum,l1tex__data_pipe_lsu_wavefronts_mem_shared.sum \
    python bench/forward_call.py 4,8192,16,32

and, for those of five kernels, --launch-skip 5 --launch-count 5. bench/results/forward_counters.json has some of what
it gave on an H200.
"""

import sys

import torch

from tilecrew.benchmark.cases import ForwardCase
from tilecrew.benchmark.measure import forward


def main() -> int:
    cases = sys.argv[1:]
    if not cases:
        print("forward_call.py BATCH,TOKENS,HEADS,VALUE_HEADS ...", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for case in cases:
        arguments = ForwardCase(*map(int, case.split(","))).arguments(torch.bfloat16, device, inside=True)
        for _ in range(3):
            forward(arguments)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
