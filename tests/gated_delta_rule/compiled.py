"""Compiles a launch of a kernel in plain Triton without a GPU."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from tilecrew.device import aot
from tilecrew.gated_delta_rule.kernel_launch import KernelLaunch


def compile_plain(launch: KernelLaunch, capability: int):
    """(compiled kernel, aot.Resources) for a CUDA device of that compute capability (90 for 9.0)."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    kernel = launch.kernel
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound_args, specialization, extra = bind(*launch.arguments, **options)
    parsed, signature, constexprs, attributes = kernel._pack_args(backend, options, bound_args, specialization, extra)
    source = ASTSource(kernel, signature, constexprs, attributes)
    compiled = triton.compile(source, target=target, options=parsed.__dict__)
    return compiled, aot.resources(compiled)
