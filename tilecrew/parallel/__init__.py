"""Ranks that work together: worlds, tensors that every rank can address, signals between ranks, and what is built on
them."""

from tilecrew.parallel.all_gather_gemm import AllGatherGemm as AllGatherGemm
from tilecrew.parallel.control import Record as Record
from tilecrew.parallel.control import WaitError as WaitError
from tilecrew.parallel.gemm_reduce_scatter import GemmReduceScatter as GemmReduceScatter
from tilecrew.parallel.launch import ProcessesError as ProcessesError
from tilecrew.parallel.launch import run_processes as run_processes
from tilecrew.parallel.signal import Signals as Signals
from tilecrew.parallel.tensor import ParallelTensor as ParallelTensor
from tilecrew.parallel.world import World as World
from tilecrew.parallel.world import on_every_rank as on_every_rank
