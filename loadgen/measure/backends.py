"""Which of a name's addresses the requests went to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.wording import format_count, format_share
from loadgen.records import Run

UNEVEN = 1.5  # times its even share of the requests, from which on an address had too many
LEAST_EACH = 10  # requests per address before a share of them means anything


@dataclass(frozen=True, slots=True)
class Backend:
    """One address: the due requests sent there, the successful ones among them, their tokens and
    their median TTFT from send (seconds, NaN without any)."""

    address: str
    requests: int
    ok: int
    output_tokens: int
    ttft_from_send_s: float


def backends(run: Run, columns: PerRequest, due: Mask) -> list[Backend]:
    """Every address that due requests were sent to, busiest first. Behind a proxy or a virtual
    address the client sees only that one."""
    found = []
    for number, address in enumerate(run.names.remotes):
        mine = due & (run.request_rows["remote_id"] == number)
        if not number or not mine.any():
            continue
        ttft_s = columns.ttft_from_send_s[mine & columns.is_ok & columns.has_token]
        found.append(
            Backend(
                address=address,
                requests=int(np.count_nonzero(mine)),
                ok=int(np.count_nonzero(mine & columns.is_ok)),
                output_tokens=int(columns.output_tokens[mine].sum()),
                ttft_from_send_s=float(np.median(ttft_s)) if len(ttft_s) else float("nan"),
            )
        )
    return sorted(found, key=lambda backend: (-backend.requests, backend.address))


def pinned(run: Run, found: Sequence[Backend]) -> str:
    """A finding where reused connections kept the load on some of the addresses of the server's
    name."""
    known = {a for shard in run.instrument.shards for a in shard.connections.known}
    addresses = known | {backend.address for backend in found}
    keeps = run.manifest.target.connections in (None, "reuse")
    total = sum(backend.requests for backend in found)
    if not keeps or len(addresses) < 2 or total < LEAST_EACH * len(addresses):
        return ""
    busiest, n_unused = found[0], len(addresses) - len(found)
    share = busiest.requests / total
    if not n_unused and share <= UNEVEN / len(addresses):
        return ""
    unused = f" and {format_count(n_unused)} got none" if n_unused else ""
    return (
        f"Of the target's {format_count(len(addresses))} addresses {busiest.address} got"
        f" {format_share(share)} of the requests{unused}: kept connections pin the load; "
        "connections:"
        " never or per_session in a target file spread it."
    )
