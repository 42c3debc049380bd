"""Waiting requests in buckets of prompt length that split and merge with the load."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import islice

from reference_engine.policies.sorted_queue import Key, Patience, SortedQueue
from reference_engine.state.plan import View
from reference_engine.state.sequence import Request

Ranked = tuple[Key, Request]

_NARROWEST = 32  # tokens; nothing is gained by telling such prompts apart


class Bucket:
    """Waiting requests with `low` ≤ prompt tokens < `high`, first come first served."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.line = SortedQueue()

    @property
    def name(self) -> str:
        return f"{self.low}-{self.high}"

    def __len__(self) -> int:
        return len(self.line)


class Buckets:
    """One bucket holds all while fewer than `split_above` requests are active. From then on each
    bucket with more than `split_above` of them splits in the middle of its range, where at least
    `split_share` of them are in the lower half; when the load is gone, all merge again.

    Source: BucketServe (arXiv 2507.17120), Algorithm 1.
    """

    def __init__(self, longest: int, split_above: int, split_share: float) -> None:
        self.all = [Bucket(0, longest + 1)]
        self.patience = Patience()
        self._split_above, self._split_share = split_above, split_share
        self._lengths: list[int] = []  # of those that wait, sorted
        self._length_of: dict[str, int] = {}

    def put(self, request: Request, overdue_s: float) -> Bucket:
        """File a request; the bucket it is in."""
        self.drop(request.id)
        n_tokens = request.n_tokens
        self._length_of[request.id] = n_tokens
        insort(self._lengths, n_tokens)
        self.patience.put(request, overdue_s)
        bucket = self.of(n_tokens)
        bucket.line.put(request, (request.arrived_s,))
        return bucket

    def drop(self, request_id: str) -> None:
        """It waits no more; when it gets overdue is remembered until `forget`."""
        n_tokens = self._length_of.pop(request_id, None)
        if n_tokens is not None:
            del self._lengths[bisect_left(self._lengths, n_tokens)]
            self.of(n_tokens).line.drop(request_id)

    def forget(self, request_id: str) -> None:
        """It is over."""
        self.drop(request_id)
        self.patience.drop(request_id)

    def of(self, n_tokens: int) -> Bucket:
        """The bucket for a prompt; of what no bucket is long enough for, the last."""
        return self.all[bisect_right(self.all, n_tokens, key=_low) - 1]

    def adjust(self, n_reading: int) -> list[Bucket]:
        """Split or merge; the buckets that are new. `n_reading` requests are active without
        waiting."""
        if len(self._lengths) + n_reading < self._split_above:
            return self._merge() if len(self.all) > 1 else []
        new = []
        i = 0
        while i < len(self.all):
            halves = self._halves(self.all[i])
            if halves:
                self.all[i : i + 1] = halves
                new += halves
            else:
                i += 1
        return [bucket for bucket in new if bucket in self.all]

    def _merge(self) -> list[Bucket]:
        whole = Bucket(0, self.all[-1].high)
        for bucket in self.all:
            for key, request in bucket.line.entries():
                whole.line.put(request, key)
        self.all = [whole]
        return self.all

    def _halves(self, bucket: Bucket) -> list[Bucket]:
        """The two parts of a bucket that is to split, else nothing."""
        middle = (bucket.low + bucket.high) // 2
        if len(bucket) <= self._split_above or bucket.high - bucket.low < 2 * _NARROWEST:
            return []
        n_below = bisect_left(self._lengths, middle) - bisect_left(self._lengths, bucket.low)
        if n_below < self._split_share * len(bucket):
            return []
        halves = [Bucket(bucket.low, middle), Bucket(middle, bucket.high)]
        for key, request in bucket.line.entries():
            halves[self._length_of[request.id] >= middle].line.put(request, key)
        return halves

    def walk(self, ordered: list[Bucket], view: View) -> Iterator[Ranked]:
        """Those that wait: the overdue ones, then bucket by bucket as `ordered`."""
        now_s, patience = view.now_s, self.patience
        for key, request in patience.walk(view):
            yield (0.0, *key), request
        for place, bucket in enumerate(ordered):
            for key, request in bucket.line.walk(view):
                if patience.until_s(request.id) > now_s:
                    yield (1.0, float(place), *key), request

    def reading(self, ordered: list[Bucket], view: View) -> list[Ranked]:
        """The running ones that still read their prompt, as the waiting ones are ranked."""
        now_s, ranked = view.now_s, list[Ranked]()
        for request in view.prefilling:
            until_s = self.patience.until_s(request.id)
            if until_s <= now_s:
                ranked.append(((0.0, until_s), request))
            else:
                place = ordered.index(self.of(request.n_tokens))
                ranked.append(((1.0, float(place), request.arrived_s), request))
        return sorted(ranked, key=_rank_of)

    def first_alone(
        self, reading: list[Ranked], waiting: Iterator[Ranked], view: View
    ) -> tuple[list[Ranked], Iterator[Ranked]]:
        """Of both, those in the bucket of the first. Within a bucket all are in order of arrival,
        the overdue ones included."""
        first = min([*reading[:1], *islice(waiting, 1)], key=_rank_of, default=None)
        if first is None:
            return [], iter(())
        bucket = self.of(first[1].n_tokens)
        alike = [
            ((request.arrived_s,), request)
            for _, request in reading
            if self.of(request.n_tokens) is bucket
        ]
        return sorted(alike, key=_rank_of), bucket.line.walk(view)


def _low(bucket: Bucket) -> int:
    return bucket.low


def _rank_of(entry: Ranked) -> Key:
    return entry[0]
