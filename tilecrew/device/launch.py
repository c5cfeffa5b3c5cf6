"""A kernel launch as a value, which can be run on a GPU or compiled without one (aot)."""

from typing import Any, NamedTuple


class Launch(NamedTuple):
    """kernel[(num_programs,)](*args, **options). Grids are flat, because only grid.x reaches past 65,535."""

    kernel: Any
    num_programs: int
    args: tuple
    options: dict[str, int]

    def run(self) -> None:
        """Launches on the current stream; an empty grid, which CUDA refuses, launches nothing."""
        if self.num_programs > 0:
            self.kernel[(self.num_programs,)](*self.args, **self.options)
