"""Errata of the texts, and claims without a test here."""

from __future__ import annotations

from loadgen.studies.claims.claim import Claim
from loadgen.studies.claims.rows.sides import untested

ERRATA: tuple[Claim, ...] = (
    untested(
        "errata-buckets",
        "bucket code of A",
        "A",
        "a class that sorts requests into buckets",
        "Prompts of 4 096 tokens or more match no bucket and are lost; `min_batch_size` is not "
        "defined; nothing ages.",
    ),
    untested(
        "errata-pollution",
        "long requests that decode",
        "A",
        "a 4 096-token request slows the batch while it decodes",
        "Its KV is 0.5 GB for 8B, 0.1 ms a step on an H200. Long prompts and full memory slow a "
        "batch, not long contexts.",
    ),
    untested(
        "errata-split-fuse",
        "split-fuse code of C",
        "C",
        "long requests are split",
        "`split_fuse_batch` never splits: a long request runs alone, or is skipped without a word.",
    ),
    untested(
        "errata-static-formulas",
        "formulas of C",
        "C",
        "static latency = longest request",
        "They leave out queueing and the prompts.",
    ),
    untested(
        "errata-vllm",
        "vLLM 2025",
        "D",
        "based on ARES and POD-Attention",
        "vLLM V1 has the schedules `fcfs` and `priority` with a token budget.",
    ),
    untested(
        "errata-ares",
        "ARES",
        "D",
        "tail latency −74.77 %, throughput 2.24 ×",
        "In the paper these are the p99 of the TPOT, and goodput.",
    ),
    untested(
        "errata-reference",
        "AI-Driven Scheduling Optimization",
        "D",
        "arxiv.org/abs/2025.xxxxx",
        "A placeholder: there is no such paper.",
    ),
    untested(
        "errata-tokens-ahead",
        "explicit cost",
        "A",
        "1.2 M tokens ahead, so 2 s",
        "That implies 600 000 tokens/s; the forecast of the bundled engine states its divisor.",
    ),
)

FUTURE: tuple[Claim, ...] = (
    untested("future-automatic", "fully automatic scheduling", "D", "AI decides", "No rule yet."),
    untested(
        "future-clouds", "cross-cloud scheduling", "D", "many clouds", "Not testable on a machine."
    ),
    untested(
        "future-intent", "scheduling by intent", "D", "predicts from intent", "No data on intents."
    ),
    untested(
        "future-quantum", "quantum optimisation", "D", "quantum help", "No such device, no method."
    ),
    untested("future-edge", "edge", "D", "large models at the edge", "No such device here."),
    untested(
        "flash-attention",
        "FlashAttention",
        "B",
        "less traffic to memory",
        "A property of kernels; the cost model assumes it, and the engine on a GPU has such a "
        "kernel.",
    ),
)
