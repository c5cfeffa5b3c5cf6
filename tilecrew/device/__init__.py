"""Device code shared by the kernels, and the one place that knows the versions of Triton."""
