"""Hooks are part of what a compiled kernel is cached under, in memory and on disk, and nothing of a gate is compiled
where there is none."""

import importlib.util
import os
import re
import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

from tests.grouped_gemm import hook_examples
from tests.grouped_gemm.problems import assert_close, expected, make
from tests.grouped_gemm.test_simulator import SMALL, simulate
from tilecrew.device import aot
from tilecrew.grouped_gemm import BandGate, CountGate, NoGate, NotifyRowBlock, kernel_grouped_gemm
from tilecrew.grouped_gemm.schedule import Problem, TileSizes, mma_sync_tiles

SIZES = TileSizes(64, 128, 64, 4, 2, 4, 128, 80, 240, 160)
PAIRS = {
    "one name, other source": (hook_examples.scaled_by_three, hook_examples.scaled_by_eight),
    "one source, other value": (lambda: hook_examples.scaled_by(3.0), lambda: hook_examples.scaled_by(8.0)),
}

# Edits of a copy of hook_examples.py: the epilogue and the gate that are made of it, what is written, and what instead.
EDITS = {
    "epilogue": (lambda module: (module.Plus(torch.rand(4)), None), "accumulator + (gl", "accumulator - (gl"),
    "what it calls": (lambda module: (module.scaled_by_three(), None), "x * 3.0", "x * 4.0"),
    "landed": (lambda module: (module.counting_by(1), None), "add(tensors[0], value", "max(tensors[0], value"),
    "gate": (
        lambda module: (None, module.Record(torch.zeros(1, dtype=torch.int32))),
        "gl.store(tensors[0] + row_block, num_rows)",
        "gl.store(tensors[0] + num_rows, row_block)",
    ),
}


def launch_with(hook, gate=None, sizes=SIZES):
    x, w, offs = make([70], 0, 64, 128)
    hooks = kernel_grouped_gemm.hooks_of(gate, hook)
    return kernel_grouped_gemm.launch(x, w, offs, torch.empty(70, 128, dtype=x.dtype), sizes, 1, hooks)


def key_in_memory(launch, known=None):
    """known: keys that Triton has worked out already, by what they follow from."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = jit.create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    _, specialization, options = bind(*launch.args, **launch.options)
    return jit.compute_cache_key({} if known is None else known, specialization, options)


@pytest.mark.parametrize("name", PAIRS)
def test_two_hooks_of_one_class_name_share_no_kernel(name):
    first, second = (make_hook() for make_hook in PAIRS[name])
    assert type(first).__qualname__.split(".")[-1] == type(second).__qualname__.split(".")[-1]
    launches = [launch_with(hook) for hook in (first, second)]
    assert key_in_memory(launches[0]) != key_in_memory(launches[1])
    compiled = [aot.compile_launch(launch) for launch in launches]
    assert compiled[0].hash != compiled[1].hash
    assert compiled[0].asm["ttgir"] != compiled[1].asm["ttgir"]
    assert key_in_memory(launches[0]) == key_in_memory(launch_with(PAIRS[name][0]()))


def test_what_follows_a_tile_is_part_of_the_key():
    """Two hooks of one class name that differ in `landed` alone, and one with none."""
    launches = [launch_with(hook_examples.counting_by(step)) for step in (1, 2, None)]
    keys = [key_in_memory(launch) for launch in launches]
    assert len(set(keys)) == 3
    compiled = [aot.compile_launch(launch) for launch in launches]
    assert len({kernel.hash for kernel in compiled}) == 3
    # Only who notifies waits for its stores.
    assert ["cp.async.bulk.wait_group 0" in kernel.asm["ptx"] for kernel in compiled] == [True, True, False]
    assert key_in_memory(launch_with(hook_examples.counting_by(1))) == keys[0]


@pytest.mark.parametrize("name", EDITS)
def test_a_hook_shares_no_kernel_with_what_it_was_before_an_edit(name, tmp_path):
    """A module is imported, edited without any change of its length, and executed again, as importlib.reload does."""
    make_hooks, old, new = EDITS[name]
    text, path = Path(hook_examples.__file__).read_text(), tmp_path / "edited_hooks.py"
    assert text.count(old) == 1
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module, known = importlib.util.module_from_spec(spec), {}
    launches, found = [], []
    for second, version in enumerate((text, text.replace(old, new), text)):
        path.write_text(version)
        os.utime(path, (second, second))  # by its time and length Python tells whether a file has changed
        spec.loader.exec_module(module)
        launches.append(launch_with(*make_hooks(module)))
        compiled = aot.compile_launch(launches[-1])
        instructions = re.sub(r"loc\(.*|#loc.*", "", compiled.asm["ttgir"])
        found.append((key_in_memory(launches[-1], known), compiled.hash, instructions))
    first, edited, again = found
    assert all(before != after for before, after in zip(first, edited, strict=True))
    assert again == first
    assert [key_in_memory(launch, known) for launch in launches] == [key for key, _, _ in found]


@pytest.mark.parametrize("with_epilogue", [False, True])
@pytest.mark.parametrize("sizes", [SIZES, mma_sync_tiles(Problem(70, 1, 64, 128, "bfloat16"))], ids=["wgmma", "mma"])
def test_a_launch_without_a_gate_has_no_code_that_waits(sizes, with_epilogue):
    """No clock is read, no flag is acquired and nothing traps: not without a gate, nor with one that never waits."""
    counters = torch.zeros(2, 4, dtype=torch.int32)
    epilogue = NotifyRowBlock(counters[0]) if with_epilogue else None
    gates = (None, NoGate(), CountGate(counters[1]), BandGate(counters[1], torch.tensor([70], dtype=torch.int32)))
    launches = [launch_with(epilogue, gate, sizes) for gate in gates]
    compiled = [aot.compile_launch(launch) for launch in launches]
    assert compiled[0].hash == compiled[1].hash
    for instruction in ("%globaltimer", "ld.acquire", "trap;"):
        assert [instruction in kernel.asm["ptx"] for kernel in compiled] == [False, False, True, True]


def test_constants_are_part_of_the_key():
    from tilecrew.grouped_gemm import SwiGLU

    assert key_in_memory(launch_with(SwiGLU(1))) != key_in_memory(launch_with(SwiGLU(8)))


@pytest.mark.slow
def test_hooks_of_users_run():
    x, w, offs = make([65, 0, 20], 5, 72, 136)
    x = torch.where(x.isnan(), 0, x)
    for hook in (hook_examples.scaled_by_three(), hook_examples.scaled_by(8.0), hook_examples.Plus(torch.rand(4))):
        assert_close(simulate(x, w, offs, SMALL, hook, num_seeds=1), expected(x, w, offs, hook), offs)


@pytest.mark.slow
def test_the_hooks_of_the_example_compile(capsys):
    """What examples/grouped_gemm_hooks.py shows runs by its torch twins here; these are its device halves."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "grouped_gemm_hooks.py"))
    assert "relative error" in capsys.readouterr().out
    counters = torch.zeros(2, 4, dtype=torch.int32)
    epilogue = example["SquaredReLU"](torch.rand(1), counters[0])
    hooks = kernel_grouped_gemm.hooks_of(example["RowsReady"](counters[1]), epilogue)
    x, w, offs = make([70], 0, 64, 128)
    launch = kernel_grouped_gemm.launch(x, w, offs, torch.empty(70, 128, dtype=x.dtype), SIZES, 1, hooks)
    compiled = aot.compile_launch(launch)
    resources = aot.resources(compiled)
    assert resources.local_memory_instructions == 0
    assert 0 < resources.wgmma_groups == resources.products
    assert all(text in compiled.asm["ptx"] for text in ("ld.acquire.gpu", "trap;", "atom.global.gpu.release.exch"))


def test_a_hook_without_a_device_function_is_refused():
    hook = hook_examples.scaled_by_three()
    type(hook).apply = staticmethod(lambda *arguments: arguments[0])
    with pytest.raises(TypeError, match=r"epilogue.apply must be a gluon.jit function"):
        launch_with(hook)
