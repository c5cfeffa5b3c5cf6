"""Random delays of a stream of a GPU: most are short, now and then one is long."""

import random

import torch

LONGEST_CYCLES = 200_000_000  # some 100 ms: the clock of an H200 has up to 1.98 GHz


def delay(generator: random.Random, longest: int = LONGEST_CYCLES) -> None:
    """Holds the current stream up, for a fifth of the longest on average."""
    torch.cuda._sleep(1 + int(longest * generator.random() ** 4))
