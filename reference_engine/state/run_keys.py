"""Keys of KV blocks of simulated texts, made when they are read, in place of hashes of tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import overload

_DIGEST_BYTES, _NUMBER_BYTES = 12, 4


def run_digest(before: bytes, token: int) -> bytes:
    """The digest of a token repeated, after the text of which `before` is a digest. Texts must be
    divided into such runs in only one way: then two runs have equal digests where they and all
    before them are equal, up to the end of the shorter."""
    return blake2b(before + token.to_bytes(8, "big"), digest_size=_DIGEST_BYTES).digest()


class RunKeys(Sequence[bytes]):
    """Keys of the blocks of runs: the digest of each run and the number of the block in it. The run
    of `digests[k]` begins at block `starts[k]`, and the last ends before block `n`. Hashes of
    further blocks can be appended."""

    __slots__ = ("_digests", "_hashes", "_n", "_starts")

    def __init__(
        self, starts: Sequence[int], digests: Sequence[bytes], n: int, hashes: Iterable[bytes] = ()
    ) -> None:
        self._starts, self._digests, self._n = starts, digests, n
        self._hashes = list(hashes)

    def append(self, key: bytes) -> None:
        self._hashes.append(key)

    def __len__(self) -> int:
        return self._n + len(self._hashes)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> RunKeys: ...
    def __getitem__(self, at: int | slice) -> bytes | RunKeys:
        if isinstance(at, slice):
            start, end, step = at.indices(len(self))
            assert (start, step) == (0, 1), f"only a beginning can be taken, not {at}"
            hashes = self._hashes[: max(0, end - self._n)]
            return RunKeys(self._starts, self._digests, min(self._n, end), hashes)
        if at < 0:
            at += len(self)
        if at >= self._n:
            return self._hashes[at - self._n]
        run = bisect_right(self._starts, at) - 1
        return self._digests[run] + (at - self._starts[run]).to_bytes(_NUMBER_BYTES, "big")

    def __iter__(self) -> Iterator[bytes]:
        return chain(map(self.__getitem__, range(self._n)), self._hashes)
