"""Ring: several stages of tiles that load roles fill by TMA and other roles read.

In step i the stage is i % num_stages. Two mbarriers a stage:
    full    one arrival of every producer, each with the byte count of its copies, and those bytes
    empty   one arrival of every consumer role
Phases are computed here from the step and nowhere else: a barrier completes its phase once every num_stages steps.
The tiles themselves belong to the kernel: a ring guards any number of them at once.
"""

from tilecrew.device.compat import aggregate, barrier, gl, gluon, mbarrier
from tilecrew.device.tiles import opaque


@gluon.jit
def remainder(step, DIVISOR: gl.constexpr):
    """step % DIVISOR, for 0 <= step < 2^31, in instructions that exist for scalars of a warp.

    A general division is one that every thread does for itself; then all addresses that follow from it are, too, and
    every MMA has to bring its own back to the warp.
    """
    if DIVISOR == 3:
        # 2^16 % 3 = 1, so both halves of step may be added; 43691 / 2^17 is 1 / 3 and exact enough below 98,304.
        folded = (step >> 16) + (step & 0xFFFF)
        third = (folded.to(gl.uint32) * 43691 >> 17).to(gl.int32)
        return folded - third * 3
    else:
        gl.static_assert(DIVISOR & (DIVISOR - 1) == 0, "stages: a power of 2, or 3")
        return step & (DIVISOR - 1)


@gluon.jit
def quotient_parity(step, DIVISOR: gl.constexpr):
    """(step // DIVISOR) & 1."""
    if DIVISOR == 3:
        return (step - remainder(step, DIVISOR)) & 1  # a multiple of 3 is as odd as its third
    else:
        return (step // DIVISOR) & 1


@aggregate
class Ring:
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    num_stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, full, empty, num_stages):
        self.full = full
        self.empty = empty
        self.num_stages = gl.constexpr(num_stages)

    @gluon.jit
    def create(num_stages: gl.constexpr, num_producers: gl.constexpr, num_consumers: gl.constexpr):
        full = gl.allocate_shared_memory(gl.int64, [num_stages, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [num_stages, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(num_stages):
            mbarrier.init(full.index(stage), count=num_producers)
            mbarrier.init(empty.index(stage), count=num_consumers)
        return Ring(full, empty, num_stages)

    @gluon.jit
    def stage(self, step):
        # Opaque, or addresses in the stage become induction variables that start, and spill, in front of all roles.
        return opaque(remainder(step, self.num_stages))

    @gluon.jit
    def acquire(self, step):
        """Producer: waits until the consumers have left the stage; returns its full barrier."""
        # A fresh barrier counts as "the phase before the first is over", so the first round passes at once.
        mbarrier.wait(self.empty.index(remainder(step, self.num_stages)), quotient_parity(step, self.num_stages) ^ 1)
        return self.full.index(remainder(step, self.num_stages))

    @gluon.jit
    def wait(self, step):
        """Consumer: waits until the tiles of this step are in shared memory."""
        mbarrier.wait(self.full.index(remainder(step, self.num_stages)), quotient_parity(step, self.num_stages))

    @gluon.jit
    def wait_released(self, step, pred=True):
        """Anyone: waits until every consumer has left the stage, at most num_stages - 1 steps after they did."""
        parity = quotient_parity(step, self.num_stages)
        mbarrier.wait(self.empty.index(remainder(step, self.num_stages)), parity, pred=pred)

    @gluon.jit
    def release(self, step):
        """Consumer: this role reads the stage no more. One thread arrives, hence the barrier: others may still read.

        No proxy fence: the reads were finished, and a role that wrote into the stage has fenced to publish that.
        """
        barrier()
        mbarrier.arrive(self.empty.index(remainder(step, self.num_stages)), count=1)
