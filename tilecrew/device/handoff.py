"""Hand-offs of one shared tile from the role that writes it to the roles that read it, once a step.

Handoff: `ready` says that the tile is written, `free` that every consumer has read it.
Signal:  `ready` alone, where another hand-off already implies that the tile is free; its user says which.
A barrier completes one phase a step, so its parity is the step's. That is safe while the producer is at most one step
ahead of its slowest consumer, which is what `free`, or the hand-off that implies it, sees to.
"""

from tilecrew.device.compat import aggregate, barrier, fence_async_shared, gl, gluon, mbarrier


@aggregate
class Signal:
    ready: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, ready):
        self.ready = ready

    @gluon.jit
    def create():
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, count=1)
        return Signal(ready)

    @gluon.jit
    def publish(self):
        """Producer, after its ordinary stores: shows them to MMA and TMA (the asynchronous proxy), then signals."""
        fence_async_shared()
        barrier()
        mbarrier.arrive(self.ready, count=1)

    @gluon.jit
    def wait(self, step):
        """Consumer: waits until the tile of this step is written."""
        mbarrier.wait(self.ready, step & 1)


@aggregate
class Handoff:
    signal: Signal
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, signal, free):
        self.signal = signal
        self.free = free

    @gluon.jit
    def create(num_consumers: gl.constexpr):
        free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(free, count=num_consumers)
        return Handoff(Signal.create(), free)

    @gluon.jit
    def acquire(self, step):
        """Producer: waits until every consumer has read the tile of the step before."""
        mbarrier.wait(self.free, (step & 1) ^ 1)

    @gluon.jit
    def publish(self):
        self.signal.publish()

    @gluon.jit
    def wait(self, step):
        self.signal.wait(step)

    @gluon.jit
    def release(self):
        """Consumer: this role has read the tile. One thread arrives, hence the barrier. It wrote nothing: no fence."""
        barrier()
        mbarrier.arrive(self.free, count=1)
