"""Continuous batching, and the batches before it."""

from __future__ import annotations

from functools import partial

from loadgen.studies.claims import exact
from loadgen.studies.claims.claim import Claim, Exact, Recorded
from loadgen.studies.claims.rows.sides import CPU, latency, tokens

CONTINUOUS: tuple[Claim, ...] = (
    Claim(
        "continuous-23x",
        "continuous batching, PagedAttention",
        "A",
        "23 × throughput",
        "overload: 512 prompt tokens, exponential answers (mean 128, at most 512); `continuous` "
        "with paged KV and 256 rows over `static` with 32",
        tokens("exponential answers", "continuous", "static"),
        "times",
        (4.3, 5.4),
        "The rows that end early and the larger batch give this with equal kernels. 23 × compared "
        "vLLM with plain Hugging Face (Anyscale 2023), other kernels included.",
    ),
    Claim(
        "orca-equal-rows",
        "Orca: iteration-level scheduling",
        "B",
        "higher GPU utilisation than static batching, no number",
        "the same, `orca` and `static` with 32 rows each",
        tokens("exponential answers", "orca:max_num_seqs=32", "static"),
        "times",
        (2.6, 3.2),
        "Scheduling alone: at most the longest answer of a batch over the mean. Orca's paper "
        "reports 36.9 × over FasterTransformer at equal latency, on a 175B model.",
    ),
    Claim(
        "continuous-30-50",
        "continuous batching",
        "C",
        "+30 to 50 % throughput",
        "overload: answers of U(50, 1000) tokens, 32 rows each",
        tokens("uneven answers", "orca:max_num_seqs=32", "static"),
        "change",
        (1.75, 2.05),
        "More than claimed, because answers differ much: the longest of 32 is 1.85 times the "
        "mean, and ended rows still read their KV.",
    ),
    Claim(
        "continuous-similar",
        "continuous batching",
        "C",
        "+30 to 50 % throughput",
        "overload: answers of similar length (cv 0.2), 32 rows each",
        tokens("similar answers", "orca:max_num_seqs=32", "static"),
        "change",
        (1.4, 1.7),
        "About as claimed, for answers of similar length.",
    ),
    Claim(
        "continuous-3-5",
        "continuous batching with PagedAttention",
        "D",
        "3 to 5 × throughput",
        "overload: answers of U(50, 1000) tokens; `chunked` with up to 256 rows over `static` "
        "with 32",
        tokens("uneven answers", "chunked", "static"),
        "times",
        (4.8, 5.8),
        "A little more than claimed, most of it by eight times the rows, not by scheduling.",
    ),
    Claim(
        "continuous-latency",
        "continuous batching",
        "C",
        "20 to 40 % lower latency",
        "3.5 req/s of U(50, 1000) answers, 32 rows each; median E2E",
        latency("e2e_p50", "uneven answers, calm", "orca:max_num_seqs=32", "static"),
        "change",
        (0.3, 0.4),
        "More than claimed: a static batch waits for its fellows and delivers at its end.",
    ),
    Claim(
        "continuous-tail",
        "continuous batching",
        "D",
        "30 to 50 % lower latency",
        "the same, p99 E2E",
        latency("e2e_p99", "uneven answers, calm", "orca:max_num_seqs=32", "static"),
        "change",
        (0.42, 0.55),
        "A little more than claimed.",
    ),
    Claim(
        "cpu-continuous",
        "continuous batching",
        "D",
        "3 to 5 × throughput",
        "bundled torch engine, shape `tiny`, one CPU core, closed loop of U(50, 1000) answers; "
        "`continuous` over `static`, three seeds",
        Recorded((2.0425, 2.1838, 2.0234), CPU),
        "times",
        (1.5, 2.5),
        "On one core a row costs its arithmetic, so more rows add little.",
    ),
    Claim(
        "static-padding",
        "static batching",
        "D",
        "46 % of the computation is wasted",
        "the text's batch: answers of 50, 200, 30 and 150 tokens",
        Exact(partial(exact.idle_slots, (50, 200, 30, 150))),
        "share",
        (0.46, 0.47),
        "Right for the slots. It is no share of GPU time: a decode step reads the weights once, "
        "whatever the number of rows.",
    ),
    Claim(
        "alignment-tax",
        "static batching: the alignment tax",
        "A",
        "97 % of the arithmetic of the short row is wasted",
        "the text's batch: prompts of 128, 1024 and 4096 tokens",
        Exact(partial(exact.idle_slots, (128, 1024, 4096))),
        "share",
        (0.57, 0.58),
        "97 % is right for the short row; of the batch, this share is padding.",
    ),
    Claim(
        "dynamic-window",
        "dynamic batching (time window)",
        "B",
        "much shorter waits than static batching at low load",
        "1 req/s of U(50, 1000) answers; `dynamic` (32 rows or 100 ms) over `static` that waits "
        "for 32 rows, p50 E2E",
        latency(
            "e2e_p50", "uneven answers, slow", "dynamic:max_batch_size=32", "static:fill_timeout=1h"
        ),
        "change",
        (0.15, 0.3),
        "Right: a window ends the wait for a full batch. Both run to their longest answer.",
    ),
    Claim(
        "selective-batching",
        "Orca: prompts and decodes in one step",
        "B",
        "higher throughput, no number",
        "12 req/s, 15 % documents of 8 000 tokens; `continuous` (mixed steps) over "
        "`prefill_first` (separate steps), median E2E",
        latency("e2e_p50", "documents, few", "continuous", "prefill_first"),
        "change",
        (0.88, 1.0),
        "A mixed step reads the weights once for both: a small gain.",
    ),
)
