"""A kernel launch as a value, which can be run on a GPU or compiled without one (aot)."""

import functools
from typing import Any, NamedTuple

from tilecrew._plans import Locate, active_recording
from tilecrew.device import compiler_key
from tilecrew.device.direct import DirectLaunch


class Launch(NamedTuple):
    """kernel[(num_programs,)](*args, **options). Grids are flat, because only grid.x reaches past 65,535."""

    kernel: Any
    num_programs: int
    args: tuple
    options: dict[str, int]

    def run(self) -> Any:
        """Launches on the current stream; an empty grid, which CUDA refuses, launches nothing. Returns what Triton has
        compiled.

        Inside a recording (`tilecrew._plans`) the launch becomes part of a plan.
        """
        if self.num_programs == 0:
            return None
        compiler_key.wait()
        compiled = self.kernel[(self.num_programs,)](*self.args, **self.options)
        recording = active_recording()
        if recording is not None:
            recording.add_launch(functools.partial(self.repeatable, compiled))
        return compiled

    def repeatable(self, compiled: Any, locate: Locate) -> DirectLaunch:
        """Its form for other addresses, when it has run `compiled`. Raises NotRepeatable."""
        return DirectLaunch(*self, compiled, locate)
