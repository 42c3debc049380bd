"""Recognition of a run whose requests are all refused, from the first of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadgen.records import Status
from targets.base import is_refusal

ALL_REFUSED = "the run's requests are refused; the preflight's were not"
"""The beginning of the end reason of such a run."""

_LEAST_REFUSED = 3  # requests with the same 4xx
_LEAST_FAILED = 10  # requests with another failure, which may be chance
_LIMITED = re.compile(r"rate[ _-]?limit|too many requests", re.IGNORECASE)  # a 429 inside a 200
_OVERLOADED = (429, 503, 504, 529)  # answers to the load, not to the request


@dataclass
class FirstFailures:
    """The failures of a shard, counted while all of its ended requests failed alike: with the same
    status, and for a reason other than the load."""

    n: int = 0
    status: int = 0
    reason: str = ""
    _is_over: bool = False

    def ended(self, status: Status, http_status: int, reason: Callable[[], str]) -> None:
        """Notes the end of a request; `reason` is called for the first failure only."""
        if self._is_over:
            return
        is_http = status is Status.http_error and http_status not in (408, 425, *_OVERLOADED)
        is_unreadable = status is Status.stream_error and http_status == 200
        if not (is_http or is_unreadable) or (self.n and http_status != self.status):
            self.n, self._is_over = 0, True
            return
        if not self.n:
            self.status, self.reason = http_status, reason()
            if is_unreadable and _LIMITED.search(self.reason):
                self._is_over = True
                return
        self.n += 1

    def message(self) -> tuple[int, int, str]:
        """Number, HTTP status and reason; the number is 0 if not all failed alike."""
        return self.n, self.status, self.reason


def refused(
    shards: Sequence[tuple[int, int, str]], n_ended: int, *, is_final: bool = False
) -> str | None:
    """The reason to stop, from each shard's `FirstFailures.message`, if all `n_ended` requests of
    the run failed alike; else None. At the end of the run a single refusal is enough."""
    failing = [shard for shard in shards if shard[0]]
    n = sum(shard[0] for shard in failing)
    if not n or n != n_ended or len({status for _, status, _ in failing}) > 1:
        return None
    _, status, reason = failing[0]
    least = (1 if is_final else _LEAST_REFUSED) if is_refusal(status) else _LEAST_FAILED
    return f"{ALL_REFUSED}: {reason} (all of the first {n})" if n >= least else None
