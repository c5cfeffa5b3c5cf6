"""Device code shared by the kernels, and the one place that knows the versions of Triton."""

from tilecrew.device import compiler_key

compiler_key.start()
