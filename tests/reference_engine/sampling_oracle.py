"""The hash that draws tokens, in Python's integers: an oracle for the vectorised code."""

from __future__ import annotations


def key(seed: int, position: int) -> int:
    """64 bits: splitmix64's finaliser of the seed, plus the position, finalised again."""
    return _mixed(_mixed(seed % 2**64) + position)


def uniform(seed: int, position: int) -> float:
    """The upper 53 bits of the key, in [0, 1)."""
    return (key(seed, position) >> 11) * 2.0**-53


def _mixed(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)
