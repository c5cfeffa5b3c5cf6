"""Compile a kernel without a GPU and read what the compiler made of it: registers, spills, shared memory, instructions.

Triton's wheel carries ptxas, cuobjdump and nvdisasm, so a launch's arguments (CPU tensors in place of device tensors)
are enough to get the cubin that a GPU would run. The private imports of this job stand here only.
"""

import math
import re
import subprocess
import tempfile
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import triton
from triton import knobs
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from tilecrew.device.compat import TRITON_VERSION, GluonASTSource
from tilecrew.device.launch import Launch

SM90 = GPUTarget("cuda", 90, 32)
LOCAL_MEMORY = re.compile(r"\b(?:STL|LDL)\b")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
LABEL = re.compile(r"^\s*(\.L_\w+):")
BRANCH = re.compile(r"\bBRA\b.*`\((\.L_\w+)\)")


@dataclass(frozen=True)
class Resources:
    """What a cubin uses.

    registers                    at entry; roles re-divide them
    local_memory_instructions    STL and LDL: spills
    local_memory_loads           LDL alone: stores that nothing loads are arguments of calls, and no spills
    spills_in_wgmma_loops        those of them in loops that have a wgmma
    wgmma, mma, tma              instructions
    wgmma_groups                 what wgmma are waited for in: one group a product, or ptxas has serialised them
    products                     of warp groups, in the kernel as Triton compiles it
    overlaid_barriers            see `overlaid_barriers`
    """

    registers: int
    local_memory_instructions: int
    local_memory_loads: int
    spills_in_wgmma_loops: int
    stack_bytes: int
    shared_memory_bytes: int
    wgmma: int
    wgmma_groups: int
    products: int
    mma: int
    tma: int
    overlaid_barriers: int


def compile_launch(launch: Launch, target: GPUTarget = SM90):
    """The compiled kernel of one launch, for `target`; nothing is launched and no GPU is needed.

    launch: a Launch, or anything else with its `kernel` (in Gluon or in plain Triton), `args` and `options`.
    Returns Triton's compiled kernel: `.asm["ttgir" | "ptx" | "cubin"]`, `.metadata.shared`.
    """
    # A launch adds this option itself; without it the compile key differs from the launch's.
    options = {"instrumentation_mode": knobs.compilation.instrumentation_mode, **launch.options}
    backend = make_backend(target)
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound_args, specialization, extra = bind(*launch.args, **options)
    parsed, signature, constexprs, attributes = kernel._pack_args(backend, options, bound_args, specialization, extra)
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_type(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=target, options=parsed.__dict__)


def resources(compiled) -> Resources:
    """Registers, spills, shared memory and the instructions that matter, read from the cubin's disassembly."""
    usage = _read(compiled, "cuobjdump", "--dump-resource-usage")
    sass = disassembly(compiled)
    return Resources(
        registers=int(re.findall(r"REG:(\d+)", usage)[-1]),
        local_memory_instructions=len(LOCAL_MEMORY.findall(sass)),
        local_memory_loads=len(re.findall(r"\bLDL\b", sass)),
        spills_in_wgmma_loops=sum(
            sum(bool(LOCAL_MEMORY.search(instruction)) for instruction in loop)
            for loop in loops(sass)
            if any("HGMMA" in instruction for instruction in loop)
        ),
        stack_bytes=int(re.findall(r"STACK:(\d+)", usage)[-1]),
        shared_memory_bytes=compiled.metadata.shared,
        wgmma=len(re.findall(r"\bHGMMA\b", sass)),
        wgmma_groups=len(re.findall(r"\bHGMMA\b.*\bgsb\d", sass)),
        products=len(re.findall(r"\bttng\.warp_group_dot\b", compiled.asm["ttgir"])),
        mma=len(re.findall(r"\bHMMA\b", sass)),
        tma=len(re.findall(r"\bUTMA(?:LDG|STG)\b", sass)),
        overlaid_barriers=overlaid_barriers(compiled),
    )


def disassembly(compiled) -> str:
    """The instructions of the cubin."""
    return _read(compiled, "nvdisasm", "-c")


def overlaid_barriers(compiled) -> int:
    """How many allocations of mbarriers share their memory with anything else. It must be none.

    PTX wants an mbarrier invalidated before its memory serves another purpose, and means it: when a GPU turns to
    another process and back, the eight bytes may be written once more, long after the last wait. Triton takes the
    memory back with the barrier's last use; a `_keep_alive` at the end of the kernel prevents that.

    Triton's passes are run once more here up to the one that places buffers, whose sum is compared with the kernel's.
    Of scratch memory only the first byte is known.
    """
    if "!ttg.memdesc<" not in compiled.asm["ttgir"]:
        return 0
    text = _with_offsets(compiled)
    total = re.search(r"ttg\.shared = (\d+)", text)
    assert total is not None and int(total[1]) == compiled.metadata.shared, "other passes than those of triton.compile"
    barriers, others = [], []
    for line in text.splitlines():
        if offset := re.search(r"allocation\.offset = (\d+)", line):
            buffer = re.search(r"local_alloc .*-> !ttg\.memdesc<((?:\d+x)+)([a-z]+)(\d+)", line)
            shape = [] if buffer is None else [int(size) for size in buffer[1].split("x")[:-1]]
            num_bytes = 1 if buffer is None else math.prod(shape) * int(buffer[3]) // 8
            is_barrier = buffer is not None and buffer[2] + buffer[3] == "i64"
            (barriers if is_barrier else others).append((int(offset[1]), int(offset[1]) + num_bytes))
    return sum(
        any(first < other_end and other_first < end for other_first, other_end in others + barriers[:number])
        for number, (first, end) in enumerate(barriers)
    )


def _with_offsets(compiled) -> str:
    """The kernel behind the pass that gives its buffers their places."""
    target = compiled.metadata.target
    context = ir.context()
    ir.load_dialects(context)
    make_backend(target).load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(compiled.asm["ttgir"])
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    # Its second argument, since Triton 3.8: whether a sanitizer is at work.
    sanitizer = () if TRITON_VERSION < (3, 8) else (False,)
    passes.ttgpuir.add_allocate_warp_groups(manager, *sanitizer)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, target.arch, 80)
    manager.run(module, "overlaid_barriers")
    return str(module)


def loops(sass: str) -> list[list[str]]:
    """The instructions of every outermost loop in a disassembly by `nvdisasm -c`.

    A loop is a set of instructions that can all reach each other. Where the compiler has put parts of it does not
    matter. Indirect branches do not count: they dispatch roles to worker warps, in a loop around all of them.
    """
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := INSTRUCTION.search(line):
            instructions.append(instruction[1])
    end = len(instructions)
    following = [
        [target for target in _following(number, text, labels) if target < end]
        for number, text in enumerate(instructions)
    ]
    leading: list[list[int]] = [[] for _ in instructions]
    for number, targets in enumerate(following):
        for target in targets:
            leading[target].append(number)
    # Kosaraju: whoever is reached against the branches, in the order of leaving, shares a loop with where one started.
    loop_of = dict[int, int]()
    for start in reversed(_order_of_leaving(following)):
        for number in _reachable(start, leading, loop_of):
            loop_of[number] = start
    members: dict[int, list[str]] = {}
    for number, start in sorted(loop_of.items()):
        members.setdefault(start, []).append(instructions[number])
    return [texts for start, texts in members.items() if len(texts) > 1 or start in following[start]]


def _following(number: int, text: str, labels: dict[str, int]) -> list[int]:
    """What may come after an instruction."""
    target = BRANCH.search(text)
    targets = [labels[target[1]]] if target else []
    leaves = re.match(r"(BRA|BRX|EXIT|RET)\b", text) is not None  # without a predicate in front
    return targets if leaves else [*targets, number + 1]


def _order_of_leaving(following: list[list[int]]) -> list[int]:
    """Depth first: every instruction after those that are first reached through it."""
    order: list[int] = []
    seen = set[int]()
    for start in range(len(following)):
        stack = [] if start in seen else [(start, iter(following[start]))]
        seen.add(start)
        while stack:
            number, targets = stack[-1]
            target = next((target for target in targets if target not in seen), None)
            if target is None:
                order.append(number)
                stack.pop()
            else:
                seen.add(target)
                stack.append((target, iter(following[target])))
    return order


def _reachable(start: int, neighbours: list[list[int]], excluded: Container[int]) -> set[int]:
    """Everything that can be reached from `start`, itself included, through nothing that is excluded."""
    found = set[int]()
    stack = [start]
    while stack:
        number = stack.pop()
        if number not in found and number not in excluded:
            found.add(number)
            stack += neighbours[number]
    return found


def _read(compiled, tool: str, option: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(path), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
