"""Which blocks may be taken next: those without content first, then those least recently freed.

    next to be taken  [blank, latest first …] [with content, least recently freed … most recent]

A block with content may be asked for again and leave from the middle. Its entry then stays and is
passed over later, which makes leaving free of charge; entries are cleared out before they are most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator


class FreeList:
    """Blocks that nobody owns, each once."""

    def __init__(self, n_blocks: int) -> None:
        self._blank = deque(range(n_blocks))
        self._full: deque[int] = deque()
        self._n_stale = [0] * n_blocks  # entries in `_full` to pass over; its oldest ones
        self._n_passed_over = 0

    def __len__(self) -> int:
        return len(self._blank) + len(self._full) - self._n_passed_over

    def give(self, full: Iterable[int], blank: Iterable[int]) -> None:
        """Blocks that were owned, in the order in which they shall be taken."""
        self._full.extend(full)
        self._blank.extendleft(blank)

    def take(self) -> int:
        """The block least worth keeping. Raises IndexError when there is none."""
        if self._blank:
            return self._blank.popleft()
        block = self._full.popleft()
        while self._n_passed_over and self._n_stale[block]:
            self._n_stale[block] -= 1
            self._n_passed_over -= 1
            block = self._full.popleft()
        return block

    def reuse(self, block: int) -> None:
        """A block with content is owned again."""
        self._n_stale[block] += 1
        self._n_passed_over += 1
        if 2 * self._n_passed_over > len(self._full) + 64:
            self._clear_out()

    def __iter__(self) -> Iterator[int]:
        """In the order in which they would be taken."""
        stale = list(self._n_stale)
        yield from self._blank
        for block in self._full:
            if stale[block]:
                stale[block] -= 1
            else:
                yield block

    def _clear_out(self) -> None:
        live = list(self)[len(self._blank) :]
        self._full = deque(live)
        self._n_stale = [0] * len(self._n_stale)
        self._n_passed_over = 0
