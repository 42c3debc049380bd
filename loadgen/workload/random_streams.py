"""One random stream per purpose, so that changing one thing leaves the others as they were."""

from __future__ import annotations

import zlib
from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a random stream is for. The numbers are part of what a seed means: append, never
    renumber."""

    arrivals = 0
    input_tokens = 1
    output_tokens = 2
    prefix = 3
    prompt = 4
    classes = 5
    turns = 6
    think = 7
    cancel = 8


def stream(seed: int, purpose: Purpose, *owner: str) -> np.random.Generator:
    """The generator of one purpose, of a class or of a step of a chain where `owner` names it:
    independent of every other one with the same seed, and of which others there are.

    Source: M. E. O'Neill, PCG (2014); NumPy's SeedSequence spawn keys.
    """
    key = (int(purpose), *(zlib.crc32(name.encode()) for name in owner))
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))
