"""Applications, cost and energy."""

from __future__ import annotations

from loadgen.studies.claims.claim import Claim, Quotient, Side
from loadgen.studies.claims.rows.sides import TOKENS, latency, tokens

APPLICATIONS: tuple[Claim, ...] = (
    Claim(
        "app-chat",
        "chat",
        "D",
        "P99 latency 2.1 s → 0.3 s (7 ×)",
        "8 req/s of `chat_poisson`; `static` over `chunked`, p99 E2E",
        latency("e2e_p99", "chat preset", "static", "chunked", prefix_cache="false"),
        "times",
        (4.5, 13),
        "About as claimed, by continuous batching alone; 0.3 s would be an answer of some 60 "
        "tokens.",
    ),
    Claim(
        "app-code",
        "code generation",
        "D",
        "1 200 → 5 600 tokens/s (4.7 ×)",
        "`code_generation` in overload; `chunked` over `static`",
        tokens("code preset, overload", "chunked", "static"),
        "times",
        (4, 8),
        "About as claimed or more, by continuous batching alone.",
    ),
    Claim(
        "app-writing",
        "writing",
        "D",
        "800 → 4 800 tokens/s (6 ×)",
        "`long_writing` in overload; `chunked` over `static`",
        tokens("writing preset, overload", "chunked", "static"),
        "times",
        (5.5, 9.5),
        "As claimed or more, by continuous batching alone.",
    ),
    Claim(
        "app-batch",
        "batch processing",
        "D",
        "2 000 → 15 000 tokens/s (7.5 ×)",
        "`offline_batch`: 1 000 summaries at once; `static` over `chunked`, time until 99 % are "
        "done",
        latency("e2e_p99", "batch preset", "static", "chunked"),
        "times",
        (2.8, 3.4),
        "Less, because long prompts take most of the time, whatever the batching.",
    ),
    Claim(
        "cost",
        "cost of inference",
        "D",
        "cost −70 %; 5 to 10 × cheaper",
        "GPU time per output token: answers of U(50, 1000) in overload, `chunked` over `static`",
        Quotient(Side("uneven answers", "static"), Side("uneven answers", "chunked"), TOKENS),
        "change",
        (0.17, 0.22),
        "As claimed against static batches at full load. A server that is not full saves nothing.",
    ),
    Claim(
        "energy",
        "energy",
        "D",
        "energy −60 %",
        "the same GPU time, at 585 W over 216 W: the median power of an H200 in two stages of the "
        "recorded suite, throughput and single decode steps",
        Quotient(
            Side("uneven answers", "static"),
            Side("uneven answers", "chunked"),
            TOKENS,
            factor=585 / 216,
        ),
        "change",
        (0.45, 0.57),
        "Less than claimed with these powers, which were not measured for these batches. With "
        "equal power of both it would be the saved time of the row above.",
    ),
)
