"""Histogram of durations with percentiles to three digits, for the live view and its transfer."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np
from hdrh.histogram import HdrHistogram
from numpy.typing import NDArray

_LOWEST_US, _HIGHEST_US, _DIGITS = 1, 600_000_000, 3
_HALF = 1024  # counts of a bucket for three digits
_FEW = 8
_ENVELOPE_BYTES = 8  # before the compressed data
_HEADER = struct.Struct(">iiiiqqd")  # cookie, length, offset, digits, lowest, highest, ratio
_MOST_BYTES = 1 << 18  # unpacked: 21 504 counts of at most nine bytes, and the header


class LiveCounts:
    """An HdrHistogram from 1 µs to 600 s with three digits; values outside count at the nearest
    bound.

    The library computes a percentile by a loop over its buckets in Python, which takes
    milliseconds; here numpy does it on the library's memory (`benchmarks/live_view.py`).
    """

    def __init__(self) -> None:
        self._histogram = HdrHistogram(_LOWEST_US, _HIGHEST_US, _DIGITS)
        self._counts = np.ctypeslib.as_array(self._histogram.counts)  # shares the memory

    @property
    def n(self) -> int:
        return int(self._histogram.get_total_count())

    def add(self, seconds: Sequence[float] | NDArray[np.float64]) -> None:
        """Adds durations. Many at once are counted by numpy on the library's memory: 0.1 µs per
        value in place of 2 µs."""
        if len(seconds) < _FEW:
            for value_s in seconds:
                self._histogram.record_value(_microseconds(value_s))
            return
        us = np.clip(np.rint(np.asarray(seconds) * 1e6), _LOWEST_US, _HIGHEST_US).astype(np.int64)
        # The index of the library's `_counts_index`: 2 048 values for the first bucket, and 1 024
        # for each further bucket, which is twice as wide.
        exponent = np.maximum(0, np.frexp(us | (2 * _HALF - 1))[1] - (_HALF.bit_length()))
        np.add.at(self._counts, (exponent << (_HALF.bit_length() - 1)) + (us >> exponent), 1)
        self._histogram.total_count += len(us)
        self._histogram.min_value = min(self._histogram.min_value, int(us.min()))
        self._histogram.max_value = max(self._histogram.max_value, int(us.max()))

    def add_many(self, seconds: float, n: int) -> None:
        """Adds the same value `n` times."""
        self._histogram.record_value(_microseconds(seconds), n)

    def rounded(self, seconds: float) -> float:
        """The value, seconds, to which a duration is rounded when it is counted."""
        us = self._histogram.get_highest_equivalent_value(_microseconds(seconds))
        return float(us) * 1e-6

    def encode(self) -> bytes:
        """The counts in HdrHistogram's compressed V2 format, as base64."""
        data: bytes = self._histogram.encode()
        return data

    def add_encoded(self, data: bytes) -> None:
        """Adds the counts that another histogram's `encode` returned, without rounding. Raises
        ValueError for any other bytes; never unpacks more than a valid histogram can hold."""
        try:
            _check_encoded(data)
            other = HdrHistogram.decode(data)
            if other.get_total_count():
                self._histogram.add(other)
        except Exception as error:  # of zlib, struct, ctypes, the library itself, …
            raise ValueError(f"not an HdrHistogram: {error}") from error

    def more_than(self, before: LiveCounts) -> LiveCounts:
        """The values added since `before`, an earlier state of this histogram."""
        later = LiveCounts()
        grown = np.maximum(self._counts.astype(np.int64) - before._counts.astype(np.int64), 0)
        for index in np.nonzero(grown)[0].tolist():
            us = self._histogram.get_value_from_index(index)
            later._histogram.record_value(us, int(grown[index]))
        return later

    def seconds(self) -> list[float]:
        """Every value, seconds, to the width of its bucket."""
        used = np.nonzero(self._counts)[0]
        values = [self._histogram.get_value_from_index(index) * 1e-6 for index in used.tolist()]
        repeated: list[float] = np.repeat(values, self._counts[used].astype(np.int64)).tolist()
        return repeated

    def quantile(self, q: float) -> float:
        """The nearest-rank q-quantile, seconds; NaN for an empty histogram."""
        if not self.n:
            return math.nan
        rank = min(self.n, max(1, math.ceil(q * self.n)))
        index = int(np.searchsorted(np.cumsum(self._counts), rank))
        return float(self._histogram.get_value_from_index(index)) * 1e-6


def _check_encoded(data: bytes) -> None:
    """Raises ValueError for a histogram that is larger than ours or has other bounds."""
    packed = base64.b64decode(data, validate=True)[_ENVELOPE_BYTES:]
    unpacker = zlib.decompressobj()
    unpacked = unpacker.decompress(packed, _MOST_BYTES)
    if unpacker.unconsumed_tail:
        raise ValueError(f"more than {_MOST_BYTES} bytes unpacked")
    _, _, _, digits, lowest_us, highest_us, _ = _HEADER.unpack_from(unpacked)
    if (lowest_us, highest_us, digits) != (_LOWEST_US, _HIGHEST_US, _DIGITS):
        raise ValueError(f"{lowest_us} to {highest_us} µs with {digits} digits")


def _microseconds(seconds: float) -> int:
    return min(_HIGHEST_US, max(_LOWEST_US, round(seconds * 1e6)))
