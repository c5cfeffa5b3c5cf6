"""Plans: what one call allocates and launches, recorded once and repeated for calls of the same signature.

A kernel implementation allocates outputs and workspace and launches kernels on them. All of that follows from the
shapes, strides, dtypes and options of a call; from one call to the next only addresses change. Working it out again in
Python and in Triton's launcher takes longer than small kernels run, so it is recorded, and a later call only fills in
addresses. A recording that saw anything else (a conversion, a copy, a launch that cannot be repeated) makes no plan.

Nothing here knows Triton: a launch says itself how it is repeated (`tilecrew.device.launch`). Plans hold no tensor.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Tensors = Sequence[torch.Tensor | None]
Results = TypeVar("Results", bound=Tensors)
Locate = Callable[[torch.Tensor], int]
ADDRESS_ALIGNMENT = 16  # kernels are compiled for workspace and outputs aligned to this
WORKSPACE_ALIGNMENT = 512  # of tensors inside of a workspace, as torch aligns what it allocates

aten = torch.ops.aten
# What a fresh tensor is filled with, by the operator that made it.
ALLOCATIONS: dict[Any, float | None] = {
    aten.empty: None,
    aten.empty_like: None,
    aten.empty_strided: None,
    aten.new_empty: None,
    aten.new_empty_strided: None,
    aten.new_zeros: 0.0,
    aten.zeros: 0.0,
    aten.zeros_like: 0.0,
}
FILLS = {aten.fill_, aten.zero_}
VIEWS = {aten.alias, aten.as_strided, aten.detach, aten.transpose, aten.view, aten._unsafe_view}


class NotRepeatable(Exception):  # noqa: N818  (the expected answer to a question, not an error)
    """Why a recording makes no plan."""


class RepeatableLaunch(Protocol):
    """A launch whose pointers are given as indices into a list of addresses."""

    def circumstances(self) -> Hashable:
        """What compiled kernels depend on beside their arguments: a change asks for a new recording."""

    def surroundings(self) -> Any:
        """What all launches of one call share: the stream, the hooks. Asked for once a call, as asking takes time."""

    def run(self, addresses: list[int], surroundings: Any) -> None: ...


class Allocation(NamedTuple):
    """A tensor that each repetition makes anew. fill: what its elements are set to, None for nothing."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    fill: float | None


class Workspace(NamedTuple):
    """What nobody sees of a call's allocations, as one: each repetition allocates `num_bytes`, and the tensors that the
    call made begin at `offsets` in them. One allocation takes 2 us, and a call may have a dozen."""

    num_bytes: int
    offsets: tuple[int, ...]
    device: torch.device


class Plan(NamedTuple):
    """Allocations and launches of a call. Slots count the call's inputs, then the allocations, then what lies in the
    workspace."""

    allocations: tuple[Allocation, ...]
    workspace: Workspace | None
    launches: tuple[RepeatableLaunch, ...]
    circumstances: Hashable
    result_slots: tuple[int | None, ...]

    def run(self, inputs: Tensors, addresses: list[int]) -> tuple[Any, ...] | None:
        """The results of the call with these inputs, at these addresses; None where the plan does not hold any more."""
        if self.launches[0].circumstances() != self.circumstances:
            return None
        tensors, addresses = list(inputs), list(addresses)
        if not self.allocate(tensors, addresses):
            return None
        surroundings = self.launches[0].surroundings()
        for launch in self.launches:
            launch.run(addresses, surroundings)
        return tuple([None if slot is None else tensors[slot] for slot in self.result_slots])

    def allocate(self, tensors: list[Any], addresses: list[int]) -> bool:
        """Appends what a repetition allocates, and the addresses of its slots; False where one is not aligned."""
        for shape, strides, dtype, device, fill in self.allocations:
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            address = tensor.data_ptr()
            if address % ADDRESS_ALIGNMENT:
                return False
            if fill is not None:
                tensor.fill_(fill)
            tensors.append(tensor)
            addresses.append(address)
        if self.workspace is not None:
            num_bytes, offsets, device = self.workspace
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            start = memory.data_ptr()
            if start % ADDRESS_ALIGNMENT:
                return False
            tensors.append(memory)  # so that it is there until the launches are on the stream
            addresses += [start + offset for offset in offsets]
        return True


class Recording(TorchDispatchMode):
    """Watches the calls inside `with`: torch's operators as a dispatch mode, launches because they report here."""

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()
        self._inputs = inputs
        self._allocations: list[torch.Tensor] = []
        self._fills: list[float | None] = []
        self._launches_before: list[int] = []
        self._launches: list[Callable[[Locate], RepeatableLaunch]] = []
        self._refusal: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, seconds of work, to keep it out of calls that it never traces."""
        return False

    def __enter__(self) -> "Recording":
        _RECORDINGS.active = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _RECORDINGS.active = None
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in ALLOCATIONS:
            self._allocations.append(result)
            self._fills.append(ALLOCATIONS[packet])
            self._launches_before.append(len(self._launches))
        elif packet in FILLS:
            self._fill(args[0], args[1] if packet is aten.fill_ else 0.0)
        elif packet not in VIEWS:
            self._refusal = f"{func} is neither an allocation nor a view"
        return result

    def add_launch(self, make: Callable[[Locate], RepeatableLaunch]) -> None:
        """Notes a launch. make: its repeatable form, given the slot of a tensor; may raise NotRepeatable."""
        self._launches.append(make)

    def plan(self, results: Tensors) -> Plan:
        """What was recorded, of a call that returned `results`. Raises NotRepeatable."""
        if self._refusal is not None:
            raise NotRepeatable(self._refusal)
        if not self._launches:
            raise NotRepeatable("nothing was launched")
        separate, together = self._apart(results)
        known = [*self._inputs, *(self._allocations[i] for i in (*separate, *together))]
        slots: dict[int, int] = {}
        for slot, tensor in enumerate(known):  # their order is that of Plan's slots
            if tensor is not None and slots.setdefault(tensor.data_ptr(), slot) != slot:
                raise NotRepeatable("two tensors are at one address: a launch does not tell which of them it means")
        if any(tensor.data_ptr() % ADDRESS_ALIGNMENT for tensor in self._allocations):
            raise NotRepeatable(f"an allocation is not aligned to {ADDRESS_ALIGNMENT} bytes")

        def locate(tensor: torch.Tensor) -> int:
            if tensor.data_ptr() not in slots:
                raise NotRepeatable(f"a tensor of shape {tuple(tensor.shape)} is no input and no allocation")
            return slots[tensor.data_ptr()]

        launches = tuple(make(locate) for make in self._launches)
        result_slots = tuple(None if result is None else locate(result) for result in results)
        for index, result in zip(result_slots, results, strict=True):
            if index is not None and not _is_same_view(result, known[index]):
                raise NotRepeatable("a result is a view of an allocation")
        allocations = tuple(self._allocation(i) for i in separate)
        workspace = _workspace([self._allocations[i] for i in together])
        return Plan(allocations, workspace, launches, launches[0].circumstances(), result_slots)

    def _allocation(self, i: int) -> Allocation:
        tensor = self._allocations[i]
        return Allocation(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, self._fills[i])

    def _apart(self, results: Tensors) -> tuple[list[int], list[int]]:
        """Numbers of the allocations that a repetition makes one by one (results, and what is filled), and of those
        that it may make together."""
        returned = {result.data_ptr() for result in results if result is not None}
        separate: list[int] = []
        together: list[int] = []
        for i, tensor in enumerate(self._allocations):
            is_seen = tensor.data_ptr() in returned or self._fills[i] is not None
            is_elsewhere = together and self._allocations[together[0]].device != tensor.device
            (separate if is_seen or is_elsewhere else together).append(i)
        return separate, together

    def _fill(self, tensor: torch.Tensor, value: Any) -> None:
        """A fill is repeatable as part of an allocation: of all of it, and before a launch could write to it."""
        for index, allocation in enumerate(self._allocations):
            is_whole = allocation.data_ptr() == tensor.data_ptr() and allocation.numel() == tensor.numel()
            if is_whole and self._launches_before[index] == len(self._launches) and isinstance(value, (int, float)):
                self._fills[index] = value
                return
        self._refusal = "something is filled that is not a fresh allocation"


def _workspace(tensors: list[torch.Tensor]) -> Workspace | None:
    """One allocation for all of these, in their order."""
    if not tensors:
        return None
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.untyped_storage().nbytes() // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    return Workspace(end, tuple(offsets), tensors[0].device)


def _is_same_view(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    return x is not None and y is not None and (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


class _Recordings(threading.local):
    active: Recording | None = None


_RECORDINGS = _Recordings()


def active_recording() -> Recording | None:
    """The recording that this thread is inside."""
    return _RECORDINGS.active


class PlainCall(NamedTuple):
    """A call whose plan may be repeated for every call of the same signature.

    signature    equal for two calls that pass the same checks and run the same kernels
    key          hash(signature): tuples do not keep theirs, and these are long
    tensors      the inputs, None for an absent one
    addresses    of the inputs, 0 for an absent one
    """

    signature: tuple[Any, ...]
    key: int
    tensors: Tensors
    addresses: list[int]


class PlanCache:
    """Plans by signature, the least recently used dropped first.

    The first call of a signature runs as it is, because many signatures (lengths of prompts) come only once; the second
    is recorded. Of two signatures with one hash the cache knows the one that came last.
    """

    def __init__(self, max_signatures: int = 512) -> None:
        self._max_signatures = max_signatures
        # hash of a signature -> the signature, and its plan. True: seen once. False: makes no plan.
        self._entries: OrderedDict[int, tuple[tuple[Any, ...], Plan | bool]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_plans(self) -> int:
        return sum(not isinstance(state, bool) for _, state in self._entries.values())

    def clear(self) -> None:
        self._entries.clear()

    def find(self, call: PlainCall | None) -> Plan | None:
        """The plan of calls like this one, None where there is none (yet)."""
        plan = None if call is None else self._state(call)
        return None if plan is None or isinstance(plan, bool) else plan

    def run(self, call: PlainCall, function: Callable[[], Results]) -> Results:
        """The results of function(), which is the call, recorded where that is due."""
        state = self._state(call)
        if state is None:
            self._store(call, True)
        addresses = [
            address for address, tensor in zip(call.addresses, call.tensors, strict=True) if tensor is not None
        ]
        if state is None or state is False or len(set(addresses)) < len(addresses):
            return function()
        with Recording(call.tensors) as recording:
            results = function()
        try:
            self._store(call, recording.plan(results))
        except NotRepeatable:
            self._store(call, False)
        return results

    def _state(self, call: PlainCall) -> Plan | bool | None:
        entry = self._entries.get(call.key)
        if entry is None or entry[0] != call.signature:
            return None
        with contextlib.suppress(KeyError):  # another thread may have dropped it meanwhile
            self._entries.move_to_end(call.key)
        return entry[1]

    def _store(self, call: PlainCall, state: Plan | bool) -> None:
        self._entries[call.key] = call.signature, state
        self._entries.move_to_end(call.key)
        if len(self._entries) > self._max_signatures:
            self._entries.popitem(last=False)
