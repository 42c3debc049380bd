"""The table of a 70B model on four H200s."""

from __future__ import annotations

from functools import partial

from loadgen.studies.claims import exact
from loadgen.studies.claims.claim import Claim, Exact
from loadgen.studies.claims.rows.sides import ON_4_H200S, latency, tokens

TABLE: tuple[Claim, ...] = (
    Claim(
        "table-throughput",
        "70B on 4 H200s",
        "D",
        "800 → 7 200 tokens/s (9 ×)",
        "overload: answers of U(50, 1000); `chunked` with 256 rows over `static` with 32",
        tokens("70B, outputs", "chunked", "static", **ON_4_H200S),
        "times",
        (5.8, 7),
        "Less than claimed, by continuous batching and a large batch alone, without ARES or POD.",
    ),
    Claim(
        "table-throughput-in",
        "70B on 4 H200s",
        "D",
        "800 → 7 200 tokens/s (9 ×)",
        "the other reading: prompts of U(50, 1000), answers of some 35 tokens",
        tokens("70B, prompts", "chunked", "static", **ON_4_H200S),
        "times",
        (2.2, 3),
        "Less, because prompts take most of the time.",
    ),
    Claim(
        "table-p99",
        "70B on 4 H200s",
        "D",
        "P99 latency −90 %",
        "1.5 req/s of U(50, 1000) answers; `chunked` over `static`, p99 E2E",
        latency("e2e_p99", "70B, outputs, calm", "chunked", "static", **ON_4_H200S),
        "change",
        (0.42, 0.55),
        "At equal load the tail halves. The table's rows are at different loads.",
    ),
    Claim(
        "table-little",
        "70B on 4 H200s",
        "D",
        "7 200 tokens/s at 0.4 s",
        "Little's law with 525 tokens a request: requests in flight (800 tokens/s at 3.2 s are "
        "4.9)",
        Exact(partial(exact.in_flight, 7200, 0.4)),
        "number",
        (5.4, 5.6),
        "All rows have five requests in flight, so their loads differ ninefold: not like for like.",
    ),
    Claim(
        "table-floor",
        "70B on 4 H200s",
        "D",
        "0.4 s mean latency",
        "525 output tokens, each reads 141 GB of weights at 4 × 4.8 TB/s; this time over 0.4 s",
        Exact(exact.faster_than_memory),
        "times",
        (9, 10),
        "So many times faster than the memory allows in 16 bits.",
    ),
)
