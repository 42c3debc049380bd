"""Several replicas."""

from __future__ import annotations

from loadgen.studies.claims.claim import Claim
from loadgen.studies.claims.rows.sides import A100S, DECODE_REPLICAS, TOKENS, setting

CLUSTERS: tuple[Claim, ...] = (
    Claim(
        "ares-random",
        "ARES/STAR: moving requests while they decode",
        "D",
        "P99 TPOT −74.77 %",
        "27 req/s, heavy-tailed answers, 2 replicas for prompts and 3 that decode, chosen at "
        "random; `rebalance=1s` over none, p99 TPOT",
        setting(
            "tpot_p99",
            "heavy tail, decode replicas",
            {**DECODE_REPLICAS, "decode_router": "random", "rebalance": "1s"},
            {**DECODE_REPLICAS, "decode_router": "random"},
        ),
        "change",
        (0.5, 1.3),
        "No proven gain in this traffic, even behind a router without eyes. The paper's number is "
        "from real chats with a trained predictor.",
    ),
    Claim(
        "distserve-tpot",
        "DistServe: prefill and decode apart",
        "B",
        "each phase meets its own SLO, no number",
        "20 req/s, 15 % documents; one replica for each phase over two `chunked`, p99 TPOT",
        setting(
            "tpot_p99",
            "questions and documents",
            {"replicas": "1:role=prefill+1:role=decode"},
            {"replicas": "2", "router": "jsq"},
        ),
        "change",
        (0.25, 0.5),
        "Decodes run undisturbed.",
    ),
    Claim(
        "distserve-ttft",
        "DistServe: prefill and decode apart",
        "B",
        "each phase meets its own SLO, no number",
        "the same, p99 TTFT",
        setting(
            "ttft_p99",
            "questions and documents",
            {"replicas": "1:role=prefill+1:role=decode"},
            {"replicas": "2", "router": "jsq"},
        ),
        "times",
        (1.3, 3.5),
        "Prompts wait longer, because half of the GPUs reads them.",
    ),
    Claim(
        "balancing",
        "load balancing",
        "D",
        "dynamic balancing, no number",
        "22 req/s of heavy-tailed answers, 4 A100s with 16 rows; shortest queue over round robin, "
        "p99 TTFT",
        setting(
            "ttft_p99",
            "heavy tail",
            {**A100S, "router": "jsq"},
            {**A100S, "router": "round_robin"},
        ),
        "change",
        (0.15, 0.8),
        "A gain where requests queue.",
    ),
    Claim(
        "pipeline-batches",
        "dynamic batches in a pipeline",
        "C",
        "enough batches fill the bubbles, no number",
        "overload: answers of U(50, 1000), 70B in four stages; four batches under way over one",
        setting(
            TOKENS,
            "uneven answers, pipeline",
            {"shape": "70b", "pipeline": "4"},
            {"shape": "70b", "pipeline": "4", "pipeline_batches": "1"},
        ),
        "times",
        (1.5, 1.75),
        "Less than four times: four batches share the rows that one has.",
    ),
)
