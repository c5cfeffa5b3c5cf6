"""What the roles of one CTA do when, measured on a GPU: Triton's intra-kernel profiler (Proton) reads the clock where
the kernels have scopes (tilecrew.device.trace); this package runs it and shows what it measured."""
