"""Launches that are remembered, for code that copies, sorts and allocates between them, of which there are no plans.

Working a launch out takes up to 0.15 ms of the host's time: the schedule, tensor maps, and in Triton which compiled
kernel the arguments need. Nothing of it changes from one call to the next but addresses. Nothing here imports Triton.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from tilecrew._plans import ADDRESS_ALIGNMENT, NotRepeatable, RepeatableLaunch, active_recording


class LaunchMemory:
    """Launches whose like has been made before, at other addresses.

    capacity: the least recently used are forgotten. Several threads may use one memory, and several GPUs: each has
    launches of its own.
    """

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        # Held for look-ups only: launches are made and run side by side, as one that compiles takes seconds.
        self._lock = threading.Lock()
        # None: it has no repeatable form.
        self._known: OrderedDict[Hashable, tuple[RepeatableLaunch, Hashable] | None] = OrderedDict()

    def run(self, key: Hashable, tensors: Sequence[torch.Tensor | None], make: Callable[[], Any]) -> None:
        """Runs make(), a `device.launch.Launch`, or its like.

        key: with the dtypes of the tensors it decides about everything in the launch but addresses. tensors: all of
        the launch's arguments that are tensors, or begin where one of these does; KeyError where one is left out.
        """
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if active_recording() is not None or any(address % ADDRESS_ALIGNMENT for address in addresses):
            make().run()
            return
        # Two that have one address have the same slot, here and in all that is like it.
        slots: dict[int, int] = {}
        which = [slots.setdefault(address, slot) for slot, address in enumerate(addresses)]
        # All tensors of a launch are on one device.
        device = next((tensor.get_device() for tensor in tensors if tensor is not None), None)
        whole = (key, device, *which, *[None if tensor is None else tensor.dtype for tensor in tensors])
        with self._lock:
            known = self._known.get(whole)
            is_known = known is not None or whole in self._known
            if is_known:
                self._known.move_to_end(whole)
        if known is not None and known[0].circumstances() == known[1]:
            known[0].run(addresses, known[0].surroundings())
            return
        launch = make()
        compiled = launch.run()
        if known is None and is_known:
            return
        entry = None
        with contextlib.suppress(NotRepeatable):
            repeatable = launch.repeatable(compiled, lambda tensor: slots[tensor.data_ptr()])
            entry = repeatable, repeatable.circumstances()
        with self._lock:
            self._known[whole] = entry
            self._known.move_to_end(whole)
            if len(self._known) > self._capacity:
                self._known.popitem(last=False)


def launch(kernel: Any, num_programs: int, args: tuple, options: dict[str, int]) -> Any:
    """A `device.launch.Launch`, for modules that are imported where there is no Triton."""
    from tilecrew.device.launch import Launch

    return Launch(kernel, num_programs, args, options)
