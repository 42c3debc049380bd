"""Decisions as an SMDP."""

from __future__ import annotations

from functools import partial

from loadgen.studies.claims import exact
from loadgen.studies.claims.claim import Claim, Exact
from loadgen.studies.claims.rows.sides import latency

DECISIONS: tuple[Claim, ...] = (
    Claim(
        "smdp-affine",
        "SMDP policy",
        "A",
        "significantly better than fixed thresholds",
        "exact, 70 % load; batches cost a constant and a part per request; optimum over greedy, "
        "mean latency",
        Exact(partial(exact.affine_latency, 0.7)),
        "change",
        (0.999, 1.0),
        "No gain on latency: greedy is optimal to 0.02 %.",
    ),
    Claim(
        "smdp-power",
        "SMDP policy with a power term",
        "A",
        "significantly better than fixed thresholds",
        "exact, 30 % load, a watt weighs 1.6 ms; optimum over greedy",
        Exact(partial(exact.power_cost, 0.3, 1.6)),
        "change",
        (0.78, 0.84),
        "A gain over greedy at low load.",
    ),
    Claim(
        "smdp-power-limit",
        "SMDP policy with a power term",
        "A",
        "significantly better than fixed thresholds",
        "the same, optimum over the best threshold for this load",
        Exact(partial(exact.power_over_limit, 0.3, 1.6)),
        "change",
        (0.999, 1.0),
        "None over a threshold that fits the load: the value lies in its choice.",
    ),
    Claim(
        "smdp-stairs",
        "SMDP policy",
        "A",
        "significantly better than fixed thresholds",
        "exact, 70 % load, batches padded to powers of two; optimum over greedy, mean latency",
        Exact(partial(exact.stairs_latency, 0.7)),
        "change",
        (0.4, 0.46),
        "A large gain where batches are padded: it serves up to the edge of a size.",
    ),
    Claim(
        "smdp-stairs-limit",
        "SMDP policy",
        "A",
        "significantly better than fixed thresholds",
        "the same, optimum over the best threshold",
        Exact(partial(exact.stairs_over_limit, 0.7)),
        "change",
        (0.4, 0.5),
        "The same over every threshold. Decode steps of large models are not padded like this.",
    ),
    Claim(
        "smdp-states",
        "state aggregation (A to D)",
        "A",
        "keeps the long-term view of the SMDP at microseconds per decision",
        "20 req/s, 15 % documents of 8 000 tokens; the hand-made table of `smdp_table` over "
        "`chunked` with a budget of 512, p99 TTFT of the short",
        latency(
            "ttft_p99",
            "questions and documents",
            "smdp_table",
            "chunked:token_budget=512",
            "short",
        ),
        "change",
        (0.05, 0.25),
        "A table by hand reads short prompts first; `bucketed` does, too, without a table. The "
        "text's states overlap and leave gaps.",
    ),
)
