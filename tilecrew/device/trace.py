"""Scopes in kernels: spans of a role's work that Triton's intra-kernel profiler (Proton) measures in clock cycles.

    switch_scope("value", None, "wait inputs")    enters the first scope of a chunk
    switch_scope("value", "wait inputs", "U")     leaves one scope, enters the next
    switch_scope("value", "U", None)              leaves the last

Each scope is entered once a chunk. A scope whose name begins with "wait" is drawn as waiting; one whose name ends with
"[-1]" works for the chunk before the one that the role is at. tilecrew.trace reads these names.

A kernel that is not traced pays nothing: without an active Proton session with instrumentation no operation is made,
and Triton caches kernels compiled with and without instrumentation apart.
"""

import sys

from tilecrew.device.compat import builtin


@builtin
def switch_scope(role, left, entered, _semantic=None):
    # Proton's own state tells whether a kernel is compiled for a trace. Without it nothing of the profiler is loaded.
    flags = sys.modules.get("triton.profiler.flags")
    if flags is None or not flags.flags.instrumentation_on:
        return
    from triton.profiler import language

    role, left, entered = (getattr(name, "value", name) for name in (role, left, entered))  # of constexprs
    if left is not None:
        language.exit_scope(f"{role}: {left}", _semantic=_semantic)
    if entered is not None:
        language.enter_scope(f"{role}: {entered}", _semantic=_semantic)
