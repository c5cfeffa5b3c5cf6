"""Launches at other addresses, handed to the driver without Triton's look-up: the one place that knows its launchers.

`kernel[grid](...)` spends its time on questions whose answers do not change from one launch to the next of the same
shapes: which compiled kernel the arguments need (their types, which integers are 1 or multiples of 16, which pointers
are aligned to 16 bytes, the text of every descriptor's layout), and what the hardware's form of each descriptor is. A
DirectLaunch has the answers of the launch it was made from. It calls the same C launcher as Triton, with the same
arguments but addresses in place of tensors, which that takes for any pointer.

Who repeats a launch answers for the alignment of its addresses (16 bytes, as they were) and for `circumstances`.
"""

import inspect
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime import driver

from tilecrew._plans import Locate, NotRepeatable
from tilecrew.device.compat import TRITON_VERSION, TensorDescriptor

# Versions whose launchers were read and are tested; with others every launch goes through Triton's look-up.
VERSIONS = ((3, 6), (3, 8), (3, 9))
MAX_TENSOR_MAPS = 256  # of one descriptor, 128 bytes each
# What Triton adds to the key of a compiled kernel beside arguments and options, in the versions that know it.
COMPILATION_KNOBS = [
    name for name in ("instrumentation_mode", "fpsan_homomorphic_casts") if hasattr(type(knobs.compilation), name)
]

Make = Callable[[list[int]], Any]


class Surroundings(NamedTuple):
    """Of launches: the current stream, and Triton's hooks before and behind one, where somebody has put any there."""

    stream: int
    hooks: tuple[Any, Any] | None


class DirectLaunch:
    """kernel[(num_programs,)](*args, **options), which has just run `compiled`, at other addresses.

    locate: the slot of a tensor in the list of addresses that `run` takes. Raises NotRepeatable for a version, a device
    or an argument that it does not know, and where a launch needs more than its arguments: scratch memory, hooks of the
    kernel.
    """

    def __init__(self, kernel: Any, num_programs: int, args: tuple, options: dict[str, int], compiled: Any, locate):
        if compiled is None:
            raise NotRepeatable("the kernel was interpreted, or a hook took its compilation over")
        if TRITON_VERSION not in VERSIONS or driver.active.get_current_target().backend != "cuda":
            raise NotRepeatable("the launcher of this version of Triton, or for this kind of device, is not known")
        if kernel.pre_run_hooks or kernel.launch_metadata is not None:
            raise NotRepeatable("a hook of the kernel wants its tensors")
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
            raise NotRepeatable("the kernel needs scratch memory")
        bound = kernel.signature.bind(*args, **{name: options[name] for name in options if name in kernel.arg_names})
        bound.apply_defaults()
        call, descriptor_metadata = _c_launcher(compiled)
        self._call = _caller(compiled, call, num_programs)
        self._compiled = compiled
        self._grid = (num_programs, 1, 1)
        self._args: list[Any] = []
        self._makers: list[tuple[int, Make]] = []
        for value, parameter in zip(bound.arguments.values(), kernel.params, strict=True):
            make, rest = None, []
            if isinstance(value, TensorDescriptor):
                make = _TensorMaps(value, next(descriptor_metadata), locate)
                rest = make.rest
            elif not parameter.is_constexpr:
                make = _maker(value, locate)
            if make is not None:
                self._makers.append((len(self._args), make))
            self._args += [value if make is None else None, *rest]

    @staticmethod
    def circumstances() -> tuple:
        """The current device, and the knobs that are part of the key of a compiled kernel."""
        runtime, compilation = knobs.runtime, knobs.compilation
        compilation_knobs = [getattr(compilation, name) for name in COMPILATION_KNOBS]
        device = driver.active.get_current_device()
        return device, runtime.debug, runtime.add_stages_inspection_hook, *compilation_knobs

    @staticmethod
    def surroundings() -> Surroundings:
        active, runtime = driver.active, knobs.runtime
        stream = active.get_current_stream(active.get_current_device())
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        return Surroundings(stream, (enter, leave) if _has_hooks(enter) or _has_hooks(leave) else None)

    def run(self, addresses: list[int], surroundings: Surroundings) -> None:
        """Launches with the tensor of slot i at addresses[i]. Hooks are called as by Triton."""
        args = self._args.copy()
        for index, make in self._makers:
            args[index] = make(addresses)
        stream, hooks = surroundings
        if hooks is None:
            self._call(stream, None, None, None, args)
        else:
            self._call(stream, self._compiled.launch_metadata(self._grid, stream), *hooks, args)


def _has_hooks(chain: Any) -> bool:
    return chain is not None and bool(getattr(chain, "calls", True))


def _c_launcher(compiled: Any) -> tuple[Callable, Any]:
    """The function in C that launches, and what the compiler noted about each of the kernel's descriptors.

    Triton wraps it in a function that makes tensor maps of descriptors, where there are any.
    """
    launch = compiled.run.launch
    if not inspect.isfunction(launch):
        return launch, iter(())
    captured = inspect.getclosurevars(launch).nonlocals
    if "launcher" not in captured or not captured.get("tensordesc_meta"):
        raise NotRepeatable("descriptors of this kernel are not passed as tensor maps")
    return captured["launcher"], iter(captured["tensordesc_meta"])


def _caller(compiled: Any, launch: Callable, num_programs: int) -> Callable:
    """Calls the C launcher with (stream, launch metadata, hook before, hook behind, kernel arguments)."""
    launcher, metadata = compiled.run, compiled.packed_metadata
    grid, function = (num_programs, 1, 1), compiled.function
    options = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    scratch = (None, None)  # global, profile
    if TRITON_VERSION == (3, 6):
        options = (*options, *scratch, metadata)
        return lambda stream, *hooks_args: launch(*grid, stream, function, *options, *hooks_args[:3], *hooks_args[3])
    options = (*options, metadata)
    tail = (*scratch, launcher.arg_annotations, launcher.kernel_signature)
    return lambda stream, *hooks_args: launch(*grid, stream, function, *options, *hooks_args[:3], *tail, hooks_args[3])


class _Address:
    """Stands for a tensor where only its address is asked for."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class _TensorMaps:
    """Tensor maps of one descriptor, which differ in their address only. rest: the arguments that follow one."""

    def __init__(self, descriptor: TensorDescriptor, metadata: Any, locate: Locate) -> None:
        if metadata is None:
            raise NotRepeatable("a descriptor of this kernel is not passed as a tensor map")
        # Builds of Triton for other GPUs need not have this module.
        from triton.backends.nvidia.driver import make_tensordesc_arg

        self._make = make_tensordesc_arg
        self._slot = locate(descriptor.base)
        self._fields = {**vars(descriptor), "base": None}
        self._metadata = (metadata,) if TRITON_VERSION == (3, 6) else (metadata, None)
        self._maps: dict[int, Any] = {}
        self.rest = self._arguments(descriptor.base.data_ptr())[1:]

    def __call__(self, addresses: list[int]) -> Any:
        address = addresses[self._slot]
        tensor_map = self._maps.get(address)
        if tensor_map is None:
            if len(self._maps) >= MAX_TENSOR_MAPS:
                self._maps.clear()
            tensor_map = self._maps[address] = self._arguments(address)[0]
        return tensor_map

    def _arguments(self, address: int) -> list[Any]:
        descriptor = object.__new__(TensorDescriptor)  # checked when its original was made
        descriptor.__dict__.update(self._fields)
        descriptor.base = _Address(address)
        return self._make(descriptor, *self._metadata)


def _maker(value: Any, locate: Locate) -> Make | None:
    """What makes a kernel argument from addresses, in the form that `value` has; None where it is a constant."""
    if value is None or isinstance(value, (bool, int, float)):
        return None
    if isinstance(value, torch.Tensor):
        return itemgetter(locate(value))
    if isinstance(value, tuple):
        makers = [_maker(element, locate) for element in value]
        if all(make is None for make in makers):
            return None
        # Where there is a maker the element is a tensor, which must not stay alive.
        parts = [(make, element if make is None else None) for make, element in zip(makers, value, strict=True)]
        return lambda addresses: tuple([constant if make is None else make(addresses) for make, constant in parts])
    raise NotRepeatable(f"an argument is a {type(value).__name__}")
