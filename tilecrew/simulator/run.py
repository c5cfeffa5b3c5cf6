"""`simulate`: compiles a launch without a GPU and runs its programs, one after the other, on the launch's tensors."""

import ast
import inspect
import random
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tilecrew.device import aot
from tilecrew.device.compat import TensorDescriptor
from tilecrew.device.launch import Launch
from tilecrew.simulator.machine import Block, Event
from tilecrew.simulator.reader import DescriptorType, Program, read
from tilecrew.simulator.values import Descriptor, FaultError, GlobalTensor, Pointer

ELEMENTS = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Run:
    """What a simulation did. events: waits and asynchronous operations, in the order in which they ended."""

    events: tuple[Event, ...]
    memory: "Memory"

    def num_unwritten(self, tensor: torch.Tensor) -> int:
        """Elements of a tensor of the launch that no program wrote."""
        written = self.memory.written(tensor)
        return written.numel() - int(written.sum())


def simulate(
    launches: Launch | Sequence[Launch],
    seed: int = 0,
    programs: Sequence[Program] | None = None,
    resident: int = 1,
) -> Run:
    """Runs every program of a launch, whose tensors are on the CPU; the kernel's writes end up in them.

    launches: one, or those of several ranks, which run at the same time and may share tensors.
    seed: chooses the order of roles and asynchronous operations; the same seed gives the same run.
    programs: the launches' kernels, if compile_program has read them already.
    resident: programs of a launch that run at the same time; the next one starts where one ends.

    Raises FaultError where a kernel does something wrong, and ValueError for what the simulator does not know.
    """
    launches = [launches] if isinstance(launches, Launch) else list(launches)
    programs = [compile_program(launch) for launch in launches] if programs is None else list(programs)
    memory, chance = Memory(), random.Random(seed)
    events: list[Event] = []
    queues = []
    for launch, program in zip(launches, programs, strict=True):
        arguments, names = bind(program, launch, memory), role_names(launch)
        queues.append(_blocks(program, arguments, launch.num_programs, names, chance, events))
    running: list[tuple[int, Block]] = []
    exhausted: set[int] = set()
    try:
        while True:
            for index, queue in enumerate(queues):
                while index not in exhausted and sum(i == index for i, _ in running) < resident:
                    block = next(queue, None)
                    if block is None:
                        exhausted.add(index)
                    else:
                        running.append((index, block))
            if not running:
                break
            _step_one(running, chance)
    finally:
        memory.write_back()
    return Run(tuple(events), memory)


def _blocks(
    program: Program,
    arguments: dict[str, Any],
    num_programs: int,
    names: list[str],
    chance: random.Random,
    events: list[Event],
) -> Iterator[Block]:
    for program_id in range(num_programs):
        block = Block(program, program_id, num_programs, names, chance, events)
        block.start(arguments)
        yield block


def _step_one(running: list[tuple[int, Block]], chance: random.Random) -> None:
    """Lets one block that can go on do so. Raises FaultError where none can."""
    order = list(range(len(running)))
    chance.shuffle(order)
    for place in order:
        block = running[place][1]
        if block.step():
            if block.is_over:
                running.pop(place)
            return
    raise FaultError("deadlock: " + "; ".join(block.waiting() for _, block in running))


def role_names(launch: Launch) -> list[str]:
    """Names of the functions that a kernel's warp_specialize starts, the first warp group's first."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(launch.kernel.fn)))
    config = dict(zip(launch.kernel.arg_names, launch.args, strict=False)).get("config")
    for call in _that_run(tree, config):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", None) == "warp_specialize":
            roles = call.args[0]
            if isinstance(roles, ast.List):
                return [ast.unparse(role.elts[0]) for role in roles.elts if isinstance(role, ast.Tuple)]
    return [launch.kernel.fn.__name__]


def _that_run(node: ast.AST, config: Any) -> Iterator[ast.AST]:
    """The node and what is in it, but for branches that a field of the kernel's config excludes."""
    yield node
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and isinstance(node.test, ast.Attribute) and ast.unparse(node.test.value) == "config":
        children = iter(node.body if getattr(config, node.test.attr) else node.orelse)
    for child in children:
        yield from _that_run(child, config)


def compile_program(launch: Launch) -> Program:
    """The launch's kernel as operations."""
    return read(aot.compile_launch(launch).asm["ttgir"])


class Memory:
    """Global memory: one GlobalTensor for each storage, so that views share what they share."""

    def __init__(self) -> None:
        self.tensors: dict[int, tuple[torch.Tensor, GlobalTensor]] = {}

    def pointer(self, tensor: torch.Tensor, name: str) -> Pointer:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self.tensors:
            flat = torch.empty(0, dtype=tensor.dtype).set_(storage)
            wide = flat.to(torch.float32 if tensor.is_floating_point() else torch.int64)
            data = wide.clone().numpy()
            self.tensors[key] = (flat, GlobalTensor(name, ELEMENTS[tensor.dtype], data))
        return Pointer(self.tensors[key][1], tensor.storage_offset())

    def written(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of the shape of a tensor of the launch: which elements the kernels wrote."""
        simulated = self.tensors[tensor.untyped_storage().data_ptr()][1]
        flat = torch.from_numpy(simulated.written)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def write_back(self) -> None:
        for flat, simulated in self.tensors.values():
            written = torch.from_numpy(simulated.written)
            flat[written] = torch.from_numpy(simulated.data)[written].to(flat.dtype)


def bind(program: Program, launch: Launch, memory: Memory) -> dict[str, Any]:
    """Values of the kernel function's arguments. Triton drops those that it took for constants."""
    function = program.kernel
    by_name: dict[str, list[tuple[str, Any]]] = {}
    for source, argument in zip(function.argument_names, function.arguments, strict=True):
        # Since Triton 3.8 the values of a descriptor and of a tuple have names of their own: "q_desc.shape.0".
        by_name.setdefault(source.split(".")[0], []).append(argument)
    values: dict[str, Any] = {}
    for name, argument in zip(launch.kernel.arg_names, launch.args, strict=False):
        expected = by_name.get(name, [])
        candidates = list(_flat(argument, name, memory, expected))
        if len(candidates) != len(expected):  # an integer 1 is a constant
            candidates = [value for value in candidates if not (type(value) is int and value == 1)]
        if len(candidates) != len(expected):
            raise ValueError(f"argument {name}: the kernel has {len(expected)} values, the launch {len(candidates)}")
        values.update(zip((parameter for parameter, _ in expected), candidates, strict=True))
    missing = [parameter for parameter, _ in function.arguments if parameter not in values]
    if missing:
        raise ValueError(f"no value for {', '.join(missing)}")
    return values


def _flat(argument: Any, name: str, memory: Memory, expected: list[tuple[str, Any]]) -> Iterable[Any]:
    """The values that one argument of the launch becomes."""
    if isinstance(argument, TensorDescriptor):
        type = expected[0][1]
        if not isinstance(type, DescriptorType):
            raise ValueError(f"argument {name}: a descriptor, but the kernel has {type}")
        pointer = memory.pointer(argument.base, name)
        box = tuple(argument.block_shape)
        yield Descriptor(pointer, tuple(argument.shape), tuple(argument.strides), box)
        yield from argument.shape
        yield from argument.strides
    elif isinstance(argument, torch.Tensor):
        yield memory.pointer(argument, name)
    elif isinstance(argument, tuple):
        for element in argument:
            yield from _flat(element, name, memory, expected)
    elif isinstance(argument, float):
        yield np.float32(argument)
    elif isinstance(argument, int) and not isinstance(argument, bool):
        yield argument
