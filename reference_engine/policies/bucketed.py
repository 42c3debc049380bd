"""Prompts of like length share a step, short ones first."""

from __future__ import annotations

from math import inf
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from loadgen.units import Seconds, Share
from reference_engine.policies.base import Policy
from reference_engine.policies.gang import Pad
from reference_engine.policies.length_buckets import Bucket, Buckets
from reference_engine.policies.sharing import causes_of, share_out
from reference_engine.policies.step_budget import StepBudget
from reference_engine.state.cost_model import NO_PADDING, Padding
from reference_engine.state.plan import Cause, Plan, View, Why
from reference_engine.state.sequence import Request


class Bucketed(Policy):
    """All decodes, then prompts bucket by bucket of prompt length, first come first served within
    one. `order: short_first` begins with the bucket of the shortest, `oldest_first` with the one
    whose oldest request waits longest. While fewer than `split_above` requests wait or read there
    is one bucket; then those with more of them split in the middle of their range, where at least
    `split_share` of theirs are below it. Whoever waited `max_bucket_wait` goes before all who came
    later, whatever its bucket.

    A bucket with fewer than `min_batch` waiting requests is left out until its oldest waited
    `max_bucket_wait`. With `pad: none` prompts are packed, and what one bucket leaves of
    `token_budget` goes to the next. With `pad: batch_max` a step reads from one bucket only, and
    every row is charged as long as the longest of the step, as kernels without packing do.
    `max_prompt_tokens` is where the range of the buckets ends (the context if 0).

    With packed prompts larger buckets gain nothing, so that buckets split early; with padded ones
    `split_above` trades rows per step against padding. A batch is never larger than the KV memory
    allows, and decodes never wait for it.

    Source: BucketServe (arXiv 2507.17120) §4, which forms such batches for separate prefill
    instances; ageing is ours, without it a long prompt could wait for ever.
    """

    kind: ClassVar[str] = "bucketed"
    is_aged: ClassVar[bool] = True
    is_work_conserving: ClassVar[bool] = True

    token_budget: int = Field(default=2048, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    watermark: float = Field(default=0.01, ge=0, lt=1)
    order: Literal["short_first", "oldest_first"] = "short_first"
    split_above: int = Field(default=1, ge=1)
    split_share: Annotated[Share, Field(gt=0, le=1)] = 0.5
    max_prompt_tokens: int = Field(default=0, ge=0)
    min_batch: int = Field(default=1, ge=1)
    max_bucket_wait: Annotated[Seconds, Field(gt=0)] = 5.0
    pad: Pad = Pad.none

    _buckets: Buckets | None = PrivateAttr(default=None)
    _admitted: list[Request] = PrivateAttr(default_factory=list)

    def on_arrival(self, request: Request, view: View) -> None:
        buckets, overdue_s = self._known(view), request.arrived_s + self.max_bucket_wait
        if view.is_running(request.id):  # taken over from another policy
            buckets.patience.put(request, overdue_s)
            return
        bucket = buckets.put(request, overdue_s)
        if self.min_batch > 1:
            view.assign(request.id, bucket.name)

    def on_finish(self, request: Request, view: View) -> None:
        self._known(view).forget(request.id)

    def plan(self, view: View) -> Plan:
        buckets = self._known(view)
        for request in self._admitted:
            if not view.is_waiting(request.id):
                buckets.drop(request.id)
        for bucket in buckets.adjust(len(view.prefilling)):
            if self.min_batch > 1:
                for _, request in bucket.line.entries():
                    view.assign(request.id, bucket.name)
        ordered, unready = self._ordered(buckets, view)
        room = StepBudget.beside_decodes(
            view,
            tokens=self.token_budget,
            max_num_seqs=self.max_num_seqs,
            watermark=self.watermark,
            is_padded=self.pad is Pad.batch_max,
        )
        reading = buckets.reading([*ordered, *unready], view)
        waiting = buckets.walk(ordered, view)
        if self.pad is Pad.batch_max:
            reading, waiting = buckets.first_alone(reading, waiting, view)
        causes, rest = causes_of(share_out(room, reading, waiting))
        self._admitted = room.admitted
        segments, until_s = self._filling(unready, view)
        is_idle = not room.items and not view.decoding
        return Plan(
            tuple(room.items),
            decode_all=True,
            causes=causes,
            segments=segments,
            rest=rest,
            wait_until_s=until_s if is_idle else None,
            padding=self._padding(room),
        )

    def explain(self, request_id: str, view: View) -> dict[str, Any]:
        request, buckets = view.find(request_id), self._known(view)
        if request is None or request_id not in buckets.patience:
            return {}
        bucket = buckets.of(request.n_tokens)
        return {
            "bucket": bucket.name,
            "in_bucket": len(bucket),
            "buckets": [other.name for other in buckets.all],
            "overdue_in_s": buckets.patience.until_s(request_id) - view.now_s,
        }

    def _known(self, view: View) -> Buckets:
        if self._buckets is None:
            longest = self.max_prompt_tokens or view.limits.max_model_len
            self._buckets = Buckets(longest, self.split_above, self.split_share)
        return self._buckets

    def _ordered(self, buckets: Buckets, view: View) -> tuple[list[Bucket], list[Bucket]]:
        """The buckets in the order in which they are served, and those that must fill first."""
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

    def _filling(
        self, unready: list[Bucket], view: View
    ) -> tuple[tuple[tuple[str, Cause], ...], float | None]:
        """Why those in buckets that must fill wait, and until when at the longest."""
        segments, until_s = [], inf
        for bucket in unready:
            ready_s = _oldest_s(bucket, view) + self.max_bucket_wait
            until_s = min(until_s, ready_s)
            cause = Cause(
                Why.bucket_not_ready, until_s=ready_s, have=len(bucket), want=self.min_batch
            )
            segments.append((bucket.name, cause))
        return tuple(segments), until_s if unready else None

    def _padding(self, room: StepBudget) -> Padding:
        n_tokens = room.padding_tokens if self.pad is Pad.batch_max else 0
        return Padding(prefill_tokens=n_tokens) if n_tokens else NO_PADDING


def _oldest_s(bucket: Bucket, view: View) -> float:
    """When the oldest waiting request of a bucket arrived; infinity for an empty one."""
    first = bucket.line.first(view)
    return inf if first is None else first[1].arrived_s
