"""Waiting requests in buckets of prompt length that split and merge with the load."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter

from reference_engine.policies.sorted_queue import (
    Key,
    OverdueQueue,
    Ranked,
    SortedQueue,
    by_rank,
    ranked_prefills,
)
from reference_engine.state.plan import View
from reference_engine.state.sequence import Request

_NARROWEST = 32  # tokens; prompts closer in length cost about the same


class Bucket:
    """Waiting requests with `low` ≤ prompt tokens < `high`, first come first served."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.queue = SortedQueue()

    @property
    def name(self) -> str:
        return f"{self.low}-{self.high}"

    def __len__(self) -> int:
        return len(self.queue)


class Buckets:
    """The buckets of a policy, shortest prompts first.

    One bucket holds all requests while fewer than `split_above` are active. From then on, each
    bucket with more than `split_above` requests splits in the middle of its range if at least the
    share `split_share` of them is in the lower half. When the load has fallen again, all merge.

    Source: BucketServe (arXiv 2507.17120), Algorithm 1.
    """

    def __init__(self, longest: int, split_above: int, split_share: float) -> None:
        self.all = [Bucket(0, longest + 1)]
        self.overdue = OverdueQueue()
        self._split_above, self._split_share = split_above, split_share
        self._lengths: list[int] = []  # prompt tokens of the waiting requests, sorted
        self._length_of: dict[str, int] = {}

    def put(self, request: Request, overdue_s: float) -> Bucket:
        """File a waiting request; returns its bucket."""
        self.drop(request.id)
        n_tokens = request.n_tokens
        self._length_of[request.id] = n_tokens
        insort(self._lengths, n_tokens)
        self.overdue.put(request, overdue_s)
        bucket = self.bucket_for(n_tokens)
        bucket.queue.put(request, (request.arrived_s,))
        return bucket

    def drop(self, request_id: str) -> None:
        """Remove a request that no longer waits. Its overdue instant is kept until `forget`."""
        n_tokens = self._length_of.pop(request_id, None)
        if n_tokens is not None:
            del self._lengths[bisect_left(self._lengths, n_tokens)]
            self.bucket_for(n_tokens).queue.drop(request_id)

    def forget(self, request_id: str) -> None:
        """Remove a request that has ended."""
        self.drop(request_id)
        self.overdue.drop(request_id)

    def bucket_for(self, n_tokens: int) -> Bucket:
        """The bucket for a prompt; the last bucket also takes longer prompts."""
        return self.all[bisect_right(self.all, n_tokens, key=attrgetter("low")) - 1]

    def adjust(self, in_prefill: Iterable[int] = ()) -> list[Bucket]:
        """Split or merge; returns the new buckets. `in_prefill` are the prompt tokens of the
        requests that are being read: they count like those that wait."""
        lengths = sorted([*self._lengths, *in_prefill])
        if len(lengths) < self._split_above:
            return self._merge() if len(self.all) > 1 else []
        new = []
        i = 0
        while i < len(self.all):
            halves = self._halves(self.all[i], lengths)
            if halves:
                self.all[i : i + 1] = halves
                new += halves
            else:
                i += 1
        return [bucket for bucket in new if bucket in self.all]

    def _merge(self) -> list[Bucket]:
        whole = Bucket(0, self.all[-1].high)
        for bucket in self.all:
            for key, request in bucket.queue.entries():
                whole.queue.put(request, key)
        self.all = [whole]
        return self.all

    def _halves(self, bucket: Bucket, lengths: Sequence[int]) -> list[Bucket]:
        """The two halves of a bucket that must split; empty if it must not. `lengths` are the
        prompt tokens of all active requests, sorted."""
        middle = (bucket.low + bucket.high) // 2
        if bucket.high - bucket.low < 2 * _NARROWEST:
            return []
        first, last = bisect_left(lengths, bucket.low), len(lengths)
        if bucket is not self.all[-1]:  # the last bucket also takes longer prompts
            last = bisect_left(lengths, bucket.high)
        n_active, n_below = last - first, bisect_left(lengths, middle) - first
        if n_active <= self._split_above or n_below < self._split_share * n_active:
            return []
        halves = [Bucket(bucket.low, middle), Bucket(middle, bucket.high)]
        for key, request in bucket.queue.entries():
            halves[self._length_of[request.id] >= middle].queue.put(request, key)
        return halves

    def waiting(self, ordered: Sequence[Bucket], view: View) -> Iterator[Ranked]:
        """The overdue waiting requests, then those of the `ordered` buckets, with their ranks."""
        by_bucket = (
            ((float(place), *key), request)
            for place, bucket in enumerate(ordered)
            for key, request in bucket.queue.walk(view)
        )
        return self.overdue.overdue_first(by_bucket, view)

    def prefills(self, ordered: Sequence[Bucket], view: View) -> list[Ranked]:
        """The running requests in prefill, ranked like those that wait."""

        def rank(request: Request) -> Key:
            place = ordered.index(self.bucket_for(request.n_tokens))
            return self.overdue.rank(request.id, (float(place), request.arrived_s), view.now_s)

        return ranked_prefills(view, rank)

    def first_bucket_only(
        self, prefills: list[Ranked], waiting: Iterator[Ranked], view: View
    ) -> tuple[list[Ranked], Iterator[Ranked]]:
        """The prefills and waiting requests of the bucket that holds the first in rank. Within the
        bucket all are in order of arrival, overdue or not."""
        first = min([*prefills[:1], *islice(waiting, 1)], key=by_rank, default=None)
        if first is None:
            return [], iter(())
        bucket = self.bucket_for(first[1].n_tokens)
        of_bucket: list[Ranked] = [
            ((request.arrived_s,), request)
            for _, request in prefills
            if self.bucket_for(request.n_tokens) is bucket
        ]
        return sorted(of_bucket, key=by_rank), bucket.queue.walk(view)
