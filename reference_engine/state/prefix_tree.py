"""The prefix cache: KV blocks by the text before and in them, as runs in a tree.

A node is a run of blocks that follow each other in a text and were computed, and are owned, alike.
It is divided where a text shares only its beginning, so that looking up, owning, freeing and
evicting cost as much as the runs, however many blocks they have.

    root ── blocks 0–6 ─┬─ 7–90      three texts that share their first 7 blocks
                        ├─ 7–12 ── 13–40
                        └─ 7–8

The key of a block stands for all of the text up to its end: where two texts have equal keys at a
place, they have equal keys before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

Keys = Sequence[bytes]


class Node:
    """Blocks `start … end` of a text with these `keys`, and the runs that follow it by their first
    key. Without blocks it is a gap, of which only blocks behind it are cached. Blocks without an
    owner are in an `entry`, which is a run of nodes that were freed together.

    `is_indexed` is false once the cache has been emptied: the blocks are not found any more."""

    __slots__ = (
        *("blocks", "children", "end", "entry", "is_indexed"),
        *("keys", "n_owners", "parent", "start"),
    )

    def __init__(
        self,
        keys: Keys,
        start: int,
        end: int,
        blocks: list[int],
        parent: Node | None,
        n_owners: int = 0,
    ) -> None:
        self.keys, self.start, self.end, self.blocks = keys, start, end, blocks
        self.parent, self.n_owners = parent, n_owners
        self.children: dict[bytes, Node] = {}
        self.entry: list[Node] | None = None
        self.is_indexed = True

    def is_growing(self, keys: Keys) -> bool:
        """Whether the blocks of the request with these keys are the only blocks here, with nothing
        behind them: the next then continue the node."""
        return self.keys is keys and self.n_owners == 1 and not self.children and self.is_indexed


class Run:
    """Blocks `start … end` of a request that are in the tree, from node `first` on. `last` is the
    node with the last of them, or was before it was divided."""

    __slots__ = ("end", "first", "last", "start")

    def __init__(self, start: int, end: int, first: Node, last: Node) -> None:
        self.start, self.end, self.first, self.last = start, end, first, last

    def nodes(self, keys: Keys) -> list[Node]:
        """The nodes, in order; `keys` are those of the request."""
        node, end = self.first, self.end
        nodes = [node]
        while node.end < end:
            node = node.children[keys[node.end]]
            nodes.append(node)
        return nodes

    def last_node(self, keys: Keys) -> Node:
        node, end = self.last, self.end
        while node.end < end:
            node = node.children[keys[node.end]]
        self.last = node
        return node


class PrefixTree:
    """The cached runs, and among them the idle: those without an owner, in the order in which they
    are evicted. `n_cached` and `n_idle` count blocks. `n_changes` counts changes of the nodes."""

    def __init__(self) -> None:
        self._root = _root()
        self.n_cached = self.n_idle = self.n_changes = 0
        self._idle: deque[list[Node]] = deque()  # entries, each evicted from its end
        self._n_empty = 0  # entries of which all nodes are owned again

    def find(self, keys: Keys, n: int) -> tuple[list[Node], int]:
        """The nodes that hold the longest cached beginning of the first `n` keys, and how many of
        them that is: it may end within the last node."""
        nodes: list[Node] = []
        at, children = 0, self._root.children
        while at < n:
            node = children.get(keys[at])
            if node is None or not node.blocks:
                break
            at = _agreed(node, keys, n)
            nodes.append(node)
            if at < node.end:
                break
            children = node.children
        return nodes, at

    def own(self, nodes: Sequence[Node], n: int) -> Run:
        """Add an owner to the first `n` blocks of a text, which `find` has found in these nodes."""
        last = nodes[-1]
        if n < last.end:
            self._divide(last, n)
        for node in nodes:
            if not node.n_owners:
                self._leave_idle(node)
            node.n_owners += 1
        return Run(0, n, nodes[0], last)

    def add(self, keys: Keys, start: int, blocks: list[int], runs: list[Run]) -> None:
        """Add the computed blocks of a request, number `start` and following, except for those
        whose text is cached already; `runs`, in their order, becomes those that were added."""
        self.n_changes += 1
        end = start + len(blocks)
        node = None
        if runs and runs[-1].end == start:
            node = runs[-1].last_node(keys)
            if not node.is_indexed:
                node = None
            elif node.is_growing(keys):
                node.blocks += blocks
                node.end = runs[-1].end = end
                self.n_cached += len(blocks)
                return
        if node is None:
            node = self._descend(keys, start)
        at = start
        while at < end:
            child = node.children.get(keys[at])
            if child is None:
                child = Node(keys, at, end, blocks[at - start :], node, 1)
                node.children[keys[at]] = child
                self._added(child, runs)
                return
            agreed = _agreed(child, keys, end)
            if child.blocks and agreed == end:
                return
            if agreed < child.end:
                self._divide(child, agreed)
            if not child.blocks:
                child.blocks, child.n_owners = blocks[at - start : agreed - start], 1
                self._added(child, runs)
            node, at = child, agreed

    def free(self, keys: Keys, blocks: Sequence[int], runs: Sequence[Run]) -> list[int]:
        """Take an owner from all blocks of a request, of which `runs` are in the tree. Returns the
        blocks that are not cached and have no owner any more, the last first."""
        blank: list[int] = []
        entry: list[Node] = []
        end = len(blocks)
        for run in reversed(runs):
            if run.end < end:
                blank += reversed(blocks[run.end : end])
            end = run.start
            for node in reversed(run.nodes(keys)):
                node.n_owners -= 1
                if node.n_owners:
                    continue
                if node.is_indexed:
                    entry.append(node)
                else:
                    blank += reversed(node.blocks)
                    node.blocks = []
        if end:
            blank += reversed(blocks[:end])
        if entry:
            entry.reverse()
            for node in entry:
                node.entry = entry
                self.n_idle += len(node.blocks)
            self._idle.append(entry)
        return blank

    def evict(self, n: int, evicted: list[tuple[bytes, int]] | None = None) -> list[int]:
        """Take the first `n` idle blocks out of the cache. There must be as many. Those that could
        be found are added to `evicted`, with their keys."""
        idle = self._idle
        taken: list[int] = []
        self.n_idle -= n
        while n:
            entry = idle[0]
            if not entry:
                idle.popleft()
                self._n_empty -= 1
                continue
            node = entry[-1]
            n_here = len(node.blocks)
            if n_here > n and node.children:
                node, n_here = self._divide(node, node.end - n), n
            if evicted is not None and node.is_indexed:
                last = range(node.end - 1, node.end - 1 - min(n, n_here), -1)
                evicted += [(node.keys[at], node.blocks[at - node.start]) for at in last]
            if n_here > n:
                n_here = n
                taken += node.blocks[: -n - 1 : -1]
                del node.blocks[-n:]
                node.end -= n
            else:
                entry.pop()
                if not entry:
                    self._n_empty += 1
                taken += reversed(node.blocks)
                node.blocks, node.entry = [], None
                _prune(node)
            n -= n_here
            if node.is_indexed:
                self.n_cached -= n_here
                self.n_changes += 1
        return taken

    def clear(self) -> None:
        """Empty the cache. The nodes stay with those who own them, and idle nodes in their
        order."""
        for node in self.nodes():
            node.is_indexed = False
        self._root, self.n_cached = _root(), 0
        self.n_changes += 1

    def nodes(self) -> Iterator[Node]:
        """All nodes that can be found, and the gaps between them."""
        left = list(self._root.children.values())
        while left:
            node = left.pop()
            yield node
            left += node.children.values()

    def idle(self) -> Iterator[int]:
        """The idle blocks, the next to be evicted first."""
        for entry in self._idle:
            for node in reversed(entry):
                assert node.entry is entry, "an idle run does not name its entry"
                assert not node.n_owners, f"an idle run has {node.n_owners} owners"
                yield from reversed(node.blocks)

    def _descend(self, keys: Keys, to: int) -> Node:
        """The node that ends at place `to` of a text; a gap where the text is unknown. A node is
        then added behind it."""
        node, at = self._root, 0
        while at < to:
            child = node.children.get(keys[at])
            if child is None:
                child = node.children[keys[at]] = Node(keys, at, to, [], node)
                return child
            at = _agreed(child, keys, to)
            if at < child.end:
                self._divide(child, at)
            node = child
        return node

    def _added(self, node: Node, runs: list[Run]) -> None:
        self.n_cached += len(node.blocks)
        before = runs[-1] if runs else None
        if before is not None and before.end == node.start and before.last.is_indexed:
            before.end, before.last = node.end, node
        else:
            runs.append(Run(node.start, node.end, node, node))

    def _divide(self, node: Node, at: int) -> Node:
        """Divide a node, which keeps its beginning. Returns the rest."""
        self.n_changes += 1
        n = at - node.start
        rest = Node(node.keys, at, node.end, node.blocks[n:], node, node.n_owners)
        del node.blocks[n:]
        rest.children, rest.is_indexed = node.children, node.is_indexed
        for child in rest.children.values():
            child.parent = rest
        node.end, node.children = at, {node.keys[at]: rest}
        entry = rest.entry = node.entry
        if entry is not None:
            entry.insert(entry.index(node) + 1, rest)
        return rest

    def _leave_idle(self, node: Node) -> None:
        entry, node.entry = node.entry, None
        assert entry is not None, "a run without an owner is idle"
        entry.remove(node)
        self.n_idle -= len(node.blocks)
        if not entry:
            self._n_empty += 1
            if 2 * self._n_empty > len(self._idle) + 64:
                self._idle = deque(entry for entry in self._idle if entry)
                self._n_empty = 0


def _root() -> Node:
    return Node((), 0, 0, [], None)


def _agreed(node: Node, keys: Keys, end: int) -> int:
    """Up to which place, at most `end`, a text goes on as this node, of which it has the first
    key."""
    own, high = node.keys, min(node.end, end)
    if own[high - 1] == keys[high - 1]:
        return high
    low, high = node.start + 1, high - 1
    while low < high:
        middle = (low + high + 1) // 2
        if own[middle - 1] == keys[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _prune(node: Node) -> None:
    """Remove a gap with nothing behind it, and the gaps before it."""
    while not node.blocks and not node.children and node.parent is not None:
        parent = node.parent
        del parent.children[node.keys[node.start]]
        node = parent
