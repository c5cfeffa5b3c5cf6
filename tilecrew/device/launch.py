"""A kernel launch as a value, which can be run on a GPU or compiled without one (aot)."""

import functools
from typing import Any, NamedTuple

from tilecrew._plans import active_recording
from tilecrew.device.direct import DirectLaunch


class Launch(NamedTuple):
    """kernel[(num_programs,)](*args, **options). Grids are flat, because only grid.x reaches past 65,535."""

    kernel: Any
    num_programs: int
    args: tuple
    options: dict[str, int]

    def run(self) -> None:
        """Launches on the current stream; an empty grid, which CUDA refuses, launches nothing.

        Inside a recording (`tilecrew._plans`) the launch becomes part of a plan.
        """
        if self.num_programs > 0:
            compiled = self.kernel[(self.num_programs,)](*self.args, **self.options)
            recording = active_recording()
            if recording is not None:
                recording.add_launch(functools.partial(DirectLaunch, *self, compiled))
