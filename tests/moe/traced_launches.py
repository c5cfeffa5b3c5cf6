"""The GPU path of the expert-parallel layer on the CPU: the host does everything as for an H200, and what it launches
is recorded instead of run. Tables are those of torch, from the ids of all ranks; all else that kernels would compute
stays undefined.

`Recorder.drain` then plays the streams: kernels run in the order of their streams, those that wait for other ranks or
other streams end when these have come as far, and what never ends is a deadlock.
"""

import contextlib
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from tests.grouped_gemm.problems import H200
from tilecrew.device.aot import SM90
from tilecrew.grouped_gemm import operators as gemm_operators
from tilecrew.moe import expert_parallel, fused, kernel_routing, one_rank, operators, routing, workspace
from tilecrew.parallel import World, fusion, host_signal
from tilecrew.parallel.world import STREAMS_OF_TORCH, distinct_streams

# Operators of torch that let the host wait for the device.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")
NUM_COMM_BLOCKS = 8


class Entry(NamedTuple):
    """kind: "kernel" (name, key: what Triton compiles it for, grid), "barrier", or "wait" (entries: those of the
    stream that is waited for)."""

    kind: str
    rank: int
    stream: str
    name: str = ""
    key: str = ""
    grid: tuple = ()
    entries: tuple = ()


class Stream:
    """Stands for one of torch's streams, which come again: equal names are the same stream."""

    def __init__(self, recorder, name):
        self.recorder, self.name = recorder, name

    def __eq__(self, other):
        return self.name == other.name

    __hash__ = None

    def wait_stream(self, other):
        log = self.recorder.log
        before = tuple(number for number, entry in enumerate(log) if entry.stream == other.name)
        log.append(Entry("wait", self.recorder.rank, self.name, entries=before[-1:]))


class Recorder(TorchDispatchMode):
    """log: Entries; operators: torch's, with the dtypes they met; host_waits: how often the host waited."""

    def __init__(self):
        super().__init__()
        self.log, self.operators, self.host_waits, self.rank = [], set(), 0, 0
        self.stream = Stream(self, "default")
        self._drawn = 0
        self._binders, self._backend = {}, make_backend(SM90)

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        options = options or {}
        with self:  # under inference_mode an operator comes here before torch has taken it apart
            result = operator.decompose(*arguments, **options)
        if result is not NotImplemented:
            return result
        leaves = torch.utils._pytree.tree_leaves((arguments, options))
        self.operators.add((str(operator), *(str(leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))))
        self.host_waits += any(name in str(operator) for name in WAITING)
        return operator(*arguments, **options)

    def new_stream(self, device=None):
        self._drawn += 1
        return Stream(self, f"torch's {self._drawn % STREAMS_OF_TORCH}")

    def host_waits_for_device(self, device=None):
        self.host_waits += 1

    @contextlib.contextmanager
    def use(self, stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def launch(self, kernel, arguments, grid, options):
        options = {"instrumentation_mode": knobs.compilation.instrumentation_mode, **options}
        if kernel not in self._binders:
            self._binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        _, specialization, extra = self._binders[kernel](*arguments, **options)
        key = f"{specialization} {sorted(extra.items(), key=str)}"
        self.log.append(Entry("kernel", self.rank, self.stream.name, kernel.fn.__name__, key, grid))

    def barrier(self, world):
        self.log.append(Entry("barrier", world.rank, self.stream.name))

    def kernels(self):
        """What Triton compiles and CUDA loads."""
        return {(entry.name, entry.key) for entry in self.log if entry.kind == "kernel"}

    def clear(self):
        self.log.clear()
        self.operators.clear()
        self.host_waits = 0

    def worlds(self, size):
        """Worlds of emulated ranks with streams."""
        worlds = World.emulated(size, device="cpu")
        streams = distinct_streams(torch.device("cpu"), 2 * size)
        for world in worlds:
            world.num_sms = H200.num_sms // size
            world.stream, world._sides = streams[world.rank], [streams[size + world.rank]]
        return worlds

    def on_every_rank(self, worlds, function, *arguments):
        """As parallel.on_every_rank does it on a GPU: one rank after the other."""
        found = []
        for world in worlds:
            with world.use():
                found.append(function(world, *arguments))
        return found

    def drain(self, size):
        """Plays all streams; what has not ended when nothing moves any more, as texts."""
        partners = self._partners(size)
        ended, started = set(), set()
        moved = True
        while moved:
            moved, blocked = False, set()
            for number, entry in enumerate(self.log):
                if number in ended or entry.stream in blocked:
                    continue
                moved |= number not in started
                started.add(number)
                needed = partners.get(number, entry.entries)
                have = started if entry.kind == "barrier" else ended
                if None not in needed and have.issuperset(needed):
                    ended.add(number)
                    moved = True
                else:
                    blocked.add(entry.stream)
        left = [entry for number, entry in enumerate(self.log) if number not in ended]
        return [f"rank {entry.rank}, {entry.stream}: {entry.name or entry.kind}" for entry in left]

    def waits_for_later(self, size):
        """What would never end if kernels ran one after the other, in the order of their launches."""
        return [
            self.log[number].name or self.log[number].kind
            for number, needed in sorted(self._partners(size).items())
            if any(other is None or other > number for other in needed)
        ]

    def _partners(self, size):
        """Barrier -> the barriers of all ranks; pull and combine -> the GEMMs of all ranks that notify, but for results
        that are pushed, behind a barrier; None: not launched."""
        barriers, combines, sources, pulls = ([[] for _ in range(size)] for _ in range(4))
        told = {}  # the GEMM in front of a rank's next combine
        for number, entry in enumerate(self.log):
            if entry.kind == "barrier":
                barriers[entry.rank].append(number)
            elif "notify_sources" in entry.key:
                told[entry.rank] = (number,)
            elif entry.name == "pull_kernel":
                pulls[entry.rank].append(number)
            elif entry.name == "combine_kernel" and "returned" not in entry.key:
                combines[entry.rank].append(number)
                sources[entry.rank].append(told.pop(entry.rank, ()))
        partners = {}
        for own in barriers:
            for turn, number in enumerate(own):
                partners[number] = [other[turn] if turn < len(other) else None for other in barriers]
        # With pull blocks these wait, once a call as combine does, and combine finds everything there.
        for own in (*combines, *pulls):
            for turn, number in enumerate(own):
                partners[number] = [n for other in sources for n in (other[turn] if turn < len(other) else (None,))]
        return partners


def install(monkeypatch):
    """Lets worlds on the CPU launch as on a GPU, into the Recorder that is returned."""
    recorder = Recorder()

    @contextlib.contextmanager
    def use(world):
        before, recorder.rank = recorder.rank, world.rank
        with recorder.use(world.stream):
            yield
        recorder.rank = before

    for name, value in (
        ("Stream", recorder.new_stream),
        ("stream", recorder.use),
        ("current_stream", lambda device=None: recorder.stream),
        ("synchronize", recorder.host_waits_for_device),
        ("device", lambda device: contextlib.nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(World, "use", use)
    for module in (workspace, fused, one_rank, operators, gemm_operators):
        monkeypatch.setattr(module, "hardware_of", lambda device: H200)
    is_gpu = property(lambda self: True, lambda self, value: None)
    monkeypatch.setattr(workspace.MoEWorkspace, "is_gpu", is_gpu, raising=False)
    monkeypatch.setattr(fusion, "comm_blocks", lambda world, asked: NUM_COMM_BLOCKS if asked is None else asked)
    monkeypatch.setattr(host_signal, "barrier", recorder.barrier)
    for module in (expert_parallel, routing):
        monkeypatch.setattr(module, "check_ids", lambda ids, num_experts: None)  # on a GPU nobody looks at them
    build = kernel_routing.build

    def build_and_fill(ids, counts, num_experts, rank, row_block, tables):
        build(ids, counts, num_experts, rank, row_block, tables)
        with torch.utils._python_dispatch._disable_current_modes():
            found = routing.torch_tables(ids, counts, num_experts, rank, row_block)
            for table, values in zip(tables, found, strict=True):
                table.copy_(values)

    gather_tables = workspace.MoEWorkspace._gather_tables
    gathering = []

    def gather(own):
        gathering.append(own)
        gather_tables(own)
        gathering.pop()

    def run(kernel, *arguments, grid, warmup, **options):
        recorder.launch(kernel, arguments, grid, options)
        if kernel.fn.__name__ == "tables_kernel":
            own = gathering[-1]
            for rank in range(own.world.size):
                own._all_ids[rank] = own.ids.peer(rank)

    monkeypatch.setattr(workspace.MoEWorkspace, "_gather_tables", gather)

    monkeypatch.setattr(kernel_routing, "build", build_and_fill)
    monkeypatch.setattr(JITFunction, "run", run)
    return recorder
