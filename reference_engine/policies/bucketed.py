"""Bucketed batching: prompts of similar length share a step, short prompts first."""

from __future__ import annotations

from math import inf
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PrivateAttr

from loadgen.fields import Seconds, Share
from reference_engine.policies.fixed_batch import Pad
from reference_engine.policies.length_buckets import Bucket, Buckets
from reference_engine.policies.ranked import plan_by_rank
from reference_engine.policies.step_budget import Causes, TokenBudgetPolicy
from reference_engine.state.cost_model import Padding
from reference_engine.state.plan import Cause, Plan, View, Why
from reference_engine.state.sequence import Request


class Bucketed(TokenBudgetPolicy):
    """All decodes, then prompts, bucket by bucket of prompt lengths, first come first served within
    a bucket. `order: short_first` begins with the bucket of the shortest prompts, `oldest_first`
    with the bucket whose oldest request has waited longest. A request that has waited
    `max_bucket_wait` (seconds) goes before all that arrived later, whatever its bucket.

    While fewer than `split_above` requests wait or are in prefill there is one bucket. From then on
    a bucket with more of them splits in the middle of its range if at least the share `split_share`
    of them is below it. The range ends at `max_prompt_tokens` (0: the context
    length). A bucket with fewer than `min_batch` waiting requests is left out until its oldest
    request has waited `max_bucket_wait`.

    With `pad: none` prompts are packed, and tokens that a bucket leaves go to the next bucket. With
    `pad: batch_max` a step takes prompts of a single bucket, and each row costs as much as the
    longest row of the step, as in kernels without packing. Packed prompts gain nothing from larger
    buckets, so buckets split early; with padding, `split_above` trades rows per step against
    padding. `max_num_seqs` and `watermark` are as in `chunked`. The KV memory bounds every batch,
    and decodes never wait for a batch.

    Source: BucketServe (arXiv 2507.17120) §4, which forms such batches for separate prefill
    instances. The ageing is an addition: without it a long prompt could wait for ever.
    """

    kind: ClassVar[str] = "bucketed"
    is_aged: ClassVar[bool] = True
    is_work_conserving: ClassVar[bool] = True
    counts_decodes: ClassVar[bool] = True

    order: Literal["short_first", "oldest_first"] = "short_first"
    split_above: int = Field(default=1, ge=1)
    split_share: Annotated[Share, Field(gt=0, le=1)] = 0.5
    max_prompt_tokens: int = Field(default=0, ge=0)
    min_batch: int = Field(default=1, ge=1)
    max_bucket_wait: Annotated[Seconds, Field(gt=0)] = 5.0
    pad: Pad = Pad.none

    _made: Buckets | None = PrivateAttr(default=None)
    _admitted: list[Request] = PrivateAttr(default_factory=list)

    def on_arrival(self, request: Request, view: View) -> None:
        buckets, overdue_s = self._buckets(view), request.arrived_s + self.max_bucket_wait
        if view.is_running(request.id):  # taken over from another policy
            buckets.overdue.put(request, overdue_s)
            return
        bucket = buckets.put(request, overdue_s)
        if self.min_batch > 1:
            view.assign(request.id, bucket.name)

    def on_finish(self, request: Request, view: View) -> None:
        self._buckets(view).forget(request.id)

    def plan(self, view: View) -> Plan:
        buckets = self._buckets(view)
        for request in self._admitted:
            if not view.is_waiting(request.id):
                buckets.drop(request.id)
        for bucket in buckets.adjust([request.n_tokens for request in view.prefilling]):
            if self.min_batch > 1:
                for _, request in bucket.queue.entries():
                    view.assign(request.id, bucket.name)
        ordered, unready = self._ordered(buckets, view)
        is_padded = self.pad is Pad.batch_max
        budget = self.budget_after_decodes(view, is_padded=is_padded)
        prefills = buckets.prefills([*ordered, *unready], view)
        waiting = buckets.waiting(ordered, view)
        if is_padded:
            prefills, waiting = buckets.first_bucket_only(prefills, waiting, view)
        plan = plan_by_rank(budget, view, prefills, waiting)
        self._admitted = budget.admitted
        segments, until_s = self._unready_causes(unready, view)
        return plan._replace(
            segments=segments,
            wait_until_s=None if budget.items or view.decoding else until_s,
            padding=Padding(prefill_tokens=budget.padding_tokens if is_padded else 0),
        )

    def is_steady(self, view: View) -> bool:
        return not view.waiting

    def explain(self, request_id: str, view: View) -> dict[str, object]:
        request, buckets = view.find(request_id), self._buckets(view)
        if request is None or request_id not in buckets.overdue:
            return {}
        bucket = buckets.bucket_for(request.n_tokens)
        return {
            "bucket": bucket.name,
            "in_bucket": len(bucket),
            "buckets": [other.name for other in buckets.all],
            "overdue_in_s": buckets.overdue.overdue_s(request_id) - view.now_s,
        }

    def _buckets(self, view: View) -> Buckets:
        # Made at the first use: only the view holds the context length.
        if self._made is None:
            longest = self.max_prompt_tokens or view.limits.max_model_len
            self._made = Buckets(longest, self.split_above, self.split_share)
        return self._made

    def _ordered(self, buckets: Buckets, view: View) -> tuple[list[Bucket], list[Bucket]]:
        """The buckets in the order of service, and those that must fill up first."""
        if self.min_batch == 1 and self.order == "short_first":
            return buckets.all, []
        oldest_s = {bucket.low: _oldest_s(bucket, view) for bucket in buckets.all}
        ordered = list(buckets.all)
        if self.order == "oldest_first":
            ordered.sort(key=lambda bucket: oldest_s[bucket.low])
        if view.is_source_closed:
            return ordered, []
        now_s, wait_s = view.now_s, self.max_bucket_wait
        unready = [
            bucket
            for bucket in ordered
            if 0 < len(bucket) < self.min_batch and oldest_s[bucket.low] + wait_s > now_s
        ]
        return [bucket for bucket in ordered if bucket not in unready], unready

    def _unready_causes(self, unready: list[Bucket], view: View) -> tuple[Causes, float | None]:
        """The cause per bucket that must fill up, and the first instant at which a bucket is
        ready."""
        causes, until_s = [], inf
        for bucket in unready:
            ready_s = _oldest_s(bucket, view) + self.max_bucket_wait
            until_s = min(until_s, ready_s)
            cause = Cause(
                Why.bucket_not_ready, until_s=ready_s, have=len(bucket), want=self.min_batch
            )
            causes.append((bucket.name, cause))
        return tuple(causes), until_s if unready else None


def _oldest_s(bucket: Bucket, view: View) -> float:
    """The arrival of the oldest waiting request of a bucket; infinity if it is empty."""
    first = bucket.queue.first(view)
    return inf if first is None else first[1].arrived_s
