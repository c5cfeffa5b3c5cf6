"""Runs compiled kernels on the CPU, under schedules worse than any GPU's, and says where they synchronise wrongly.

    reader.py       the compiled kernel's TTGIR, as operations
    layouts.py      which thread holds which element, and where elements lie in shared memory
    ptx.py          inline assembly
    values.py       pointers, descriptors, rounding
    memory.py       shared memory, barriers, races
    operations.py   operations without memory
    effects.py      operations with memory: shared, global, barriers, asynchronous copies and products
    tasks.py        roles, and what they have in flight
    machine.py      one block: control flow and the seeded scheduler
    run.py          `simulate`: a launch, its arguments and its grid

It needs no GPU: Triton's own compiler makes the TTGIR. What it simulates is the program that ships, up to and not
including the translation to PTX. An operation that it does not know is an error that names it.
"""

from tilecrew.simulator.run import simulate
from tilecrew.simulator.values import FaultError

__all__ = ["FaultError", "simulate"]
