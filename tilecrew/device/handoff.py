"""Hand-offs of shared tiles from the role that writes them to the roles that read them, once a step.

Handoff: the tile has one copy; `ready` says that it is written, `free` that every consumer has read it.
Signal:  only `ready`, one barrier a stage of the ring that holds the tile; the ring's `empty` frees it.
A barrier completes one phase each time its tile is written, so its parity follows from the step and nothing else. That is
safe while a producer is at most one round ahead of its slowest consumer: `free` or the ring's `empty` sees to it.
"""

from tilecrew.device.compat import aggregate, barrier, fence_async_shared, gl, gluon, mbarrier


@aggregate
class Signal:
    ready: gl.shared_memory_descriptor
    num_stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ready, num_stages):
        self.ready = ready
        self.num_stages = gl.constexpr(num_stages)

    @gluon.jit
    def create(num_stages: gl.constexpr):
        ready = gl.allocate_shared_memory(gl.int64, [num_stages, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(num_stages):
            mbarrier.init(ready.index(stage), count=1)
        return Signal(ready, num_stages)

    @gluon.jit
    def publish(self, step):
        """Producer, after its ordinary stores: makes them visible to MMA and TMA (the asynchronous proxy), then signals."""
        fence_async_shared()
        barrier()
        mbarrier.arrive(self.ready.index(step % self.num_stages), count=1)

    @gluon.jit
    def wait(self, step):
        mbarrier.wait(self.ready.index(step % self.num_stages), (step // self.num_stages) & 1)


@aggregate
class Handoff:
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, ready, free):
        self.ready = ready
        self.free = free

    @gluon.jit
    def create(num_consumers: gl.constexpr):
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, count=1)
        mbarrier.init(free, count=num_consumers)
        return Handoff(ready, free)

    @gluon.jit
    def acquire(self, step):
        """Producer: waits until every consumer has read the tile of the step before."""
        mbarrier.wait(self.free, (step & 1) ^ 1)

    @gluon.jit
    def publish(self):
        """Producer, after its ordinary stores: makes them visible to MMA and TMA (the asynchronous proxy), then signals."""
        fence_async_shared()
        barrier()
        mbarrier.arrive(self.ready, count=1)

    @gluon.jit
    def wait(self, step):
        """Consumer: waits until the tile of this step is written."""
        mbarrier.wait(self.ready, step & 1)

    @gluon.jit
    def release(self):
        """Consumer: this role has read the tile. One thread arrives, hence the barrier. No fence: nothing was written."""
        barrier()
        mbarrier.arrive(self.free, count=1)
