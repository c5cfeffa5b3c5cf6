"""Asynchronous copies of a warp's own, which the simulator does not know, as loads and stores that are over at once."""

from tilecrew.device.compat import gl, gluon


@gluon.jit
def copy_at_once(tile, pointer, mask, cache_modifier: gl.constexpr):
    tile.store(gl.load(pointer, mask=mask, other=0.0))


@gluon.jit
def no_group():
    pass


@gluon.jit
def nothing_to_wait_for(number: gl.constexpr):
    pass
