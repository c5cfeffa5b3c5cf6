"""Ranks as processes: every rank writes its part, tells the others, and sums what they wrote."""

import torch

from tilecrew.parallel import ParallelTensor, Signals, World, run_processes


def work(world: World) -> float:
    """What each rank does."""
    shard = ParallelTensor((4, 8), torch.float32, world)  # collective: every rank makes one
    ready = Signals(world, num_slots=1)
    shard.local.fill_(world.rank)
    for peer in range(world.size):
        ready.put(0, peer, epoch=1)  # behind what this rank has written
    total = torch.zeros(4, 8)
    for peer in range(world.size):
        ready.wait(0, peer, epoch=1)  # raises after world.timeout_seconds
        total += shard.peer(peer)
    world.barrier()
    shard.destroy()
    return total[0, 0].item()


if __name__ == "__main__":
    for rank, total in enumerate(run_processes(work, 3)):
        print(f"rank {rank} has summed {total}")
