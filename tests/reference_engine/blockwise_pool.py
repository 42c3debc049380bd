"""An oracle of `KvPool`: the same rules for every block by itself, in the plainest data."""

from __future__ import annotations

from hashlib import blake2b

from reference_engine.state.sequence import Request


class BlockwisePool:
    """`blocks` of requests by their ids, `published` leading blocks of each, and their counts of
    owners. `blank` and `idle` are free, in the order in which they are taken."""

    def __init__(self, n_blocks: int, size: int) -> None:
        self.size = size
        self.blank, self.idle = list(range(n_blocks)), list[int]()
        self.n_owners = dict.fromkeys(range(n_blocks), 0)
        self.block_of: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.published: dict[str, int] = {}

    @property
    def n_free(self) -> int:
        return len(self.blank) + len(self.idle)

    def keys(self, request: Request, n: int) -> list[str]:
        """Texts that two blocks share where they and all before them are equal."""
        texts = [(request.tenant, request.tokens[: self.size * (k + 1)]) for k in range(n)]
        return [blake2b(repr(text).encode(), digest_size=16).hexdigest() for text in texts]

    def hits(self, request: Request) -> list[int]:
        found: list[int] = []
        for key in self.keys(request, (len(request.tokens) - 1) // self.size):
            if key not in self.block_of:
                break
            found.append(self.block_of[key])
        return found

    def missing_to_admit(self, request: Request, n_tokens: int) -> int:
        hits = self.hits(request)
        n_room = -(-(len(hits) * self.size + n_tokens) // self.size)
        return n_room - len(hits) + sum(not self.n_owners[block] for block in hits)

    def freed_by(self, victim: Request, request: Request) -> int:
        own = [block for block in self.blocks[victim.id] if self.n_owners[block] == 1]
        return len(set(own) - set(self.hits(request)))

    def admit(self, request: Request, n_tokens: int) -> int:
        """Returns the tokens that were cached."""
        hits = self.hits(request)
        for block in hits:
            if not self.n_owners[block]:
                self.idle.remove(block)
            self.n_owners[block] += 1
        self.blocks[request.id], self.published[request.id] = hits, len(hits)
        n_cached = len(hits) * self.size
        self.grow(request, n_cached + n_tokens)
        return n_cached

    def grow(self, request: Request, n_room: int) -> None:
        """Give room for `n_room` tokens in total."""
        blocks = self.blocks[request.id]
        blocks += self.take(max(0, -(-n_room // self.size) - len(blocks)))

    def take(self, n: int) -> list[int]:
        taken: list[int] = []
        for _ in range(n):
            if self.blank:
                block = self.blank.pop(0)
            else:
                block = self.idle.pop(0)
                self.block_of = {key: b for key, b in self.block_of.items() if b != block}
            self.n_owners[block] = 1
            taken.append(block)
        return taken

    def publish(self, request: Request, n_computed: int) -> None:
        n_full = n_computed // self.size
        keys = self.keys(request, n_full)
        for k in range(self.published[request.id], n_full):
            self.block_of.setdefault(keys[k], self.blocks[request.id][k])
        self.published[request.id] = max(n_full, self.published[request.id])

    def free(self, blocks: list[int]) -> None:
        cached = set(self.block_of.values())
        for block in reversed(blocks):
            self.n_owners[block] -= 1
            if self.n_owners[block]:
                continue
            if block in cached:
                self.idle.append(block)
            else:
                self.blank.insert(0, block)

    def clear(self) -> int:
        n_cached = len(self.block_of)
        self.block_of.clear()
        return n_cached
