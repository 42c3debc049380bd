"""The order of requests, and prompts in pieces."""

from __future__ import annotations

from loadgen.studies.claims.claim import CapacityQuotient, Claim, Quotient, Recorded, Side
from loadgen.studies.claims.rows.sides import CPU, MIX, latency

ORDER: tuple[Claim, ...] = (
    Claim(
        "mixed-e2e-chunked",
        "chunked prefill (Sarathi-Serve, vLLM V1)",
        "A",
        "p99 of short requests 3 to 5 × higher in a mixed load",
        "20 req/s with 5 % prompts of 16 000 tokens over 19 req/s of short requests alone, "
        "`chunked`; p99 E2E of the short",
        Quotient(Side(MIX, "chunked"), Side("short alone", "chunked"), "e2e_p99", "short"),
        "times",
        (2.5, 9),
        "About as claimed for E2E; see the next row for TTFT.",
    ),
    Claim(
        "mixed-ttft-chunked",
        "chunked prefill (Sarathi-Serve, vLLM V1)",
        "A",
        "p99 of short requests 3 to 5 × higher in a mixed load",
        "the same; p99 TTFT of the short",
        Quotient(Side(MIX, "chunked"), Side("short alone", "chunked"), "ttft_p99", "short"),
        "times",
        (40, 200),
        "The claim hides the metric: the TTFT suffers far more than the E2E latency.",
    ),
    Claim(
        "mixed-e2e-orca",
        "Orca",
        "A",
        "p99 of short requests 3 to 5 × higher in a mixed load",
        "the same with `continuous` (whole prompts); p99 E2E of the short",
        Quotient(Side(MIX, "continuous"), Side("short alone", "continuous"), "e2e_p99", "short"),
        "times",
        (2.5, 13),
        "A wide range, from about as claimed to much more: a whole prompt stops every stream.",
    ),
    Claim(
        "sarathi-itl",
        "Sarathi-Serve (chunked prefill)",
        "P",
        "stall-free batching: 2.6 × capacity on a 7B model",
        "20 req/s, 15 % documents of 8 000 tokens; `chunked` with a budget of 512 over "
        "`prefill_first`, p99 ITL",
        latency("itl_p99", "questions and documents", "chunked:token_budget=512", "prefill_first"),
        "change",
        (0.01, 0.1),
        "Pieces of prompts end the stalls.",
    ),
    Claim(
        "cpu-chunked-itl",
        "Sarathi-Serve (chunked prefill)",
        "P",
        "stall-free batching",
        "bundled torch engine, shape `tiny`, one CPU core; `chunked` with a budget of 64 over "
        "`prefill_first`, p99 ITL, three seeds",
        Recorded((0.0729, 0.0939, 0.0537), CPU),
        "change",
        (0.02, 0.2),
        "The same on a real engine.",
    ),
    Claim(
        "fastgen-itl",
        "DeepSpeed-FastGen (SplitFuse)",
        "D",
        "smart scheduling, no number",
        "20 req/s, 15 % documents of 8 000 tokens; `split_fuse` over `prefill_first`, p99 ITL",
        latency("itl_p99", "questions and documents", "split_fuse", "prefill_first"),
        "change",
        (0.01, 0.1),
        "The same rule as chunked prefill, and the same effect.",
    ),
    Claim(
        "vllm-prefill-first",
        "vLLM V0: prompts first",
        "B",
        "the shortest TTFT, longer gaps between tokens",
        "12 req/s, 15 % documents of 8 000 tokens; `prefill_first` over `chunked` with a budget "
        "of 512, p50 TTFT",
        latency("ttft_p50", "documents, few", "prefill_first", "chunked:token_budget=512"),
        "change",
        (0.2, 1.4),
        "Often shorter in the median; the gaps between tokens pay for it (rows above).",
    ),
    Claim(
        "bucket-ttft",
        "BucketServe: short prompts first",
        "A",
        "short requests bypass long ones, no number",
        "20 req/s, 15 % documents of 8 000 tokens; `bucketed` over `chunked`, both with a budget "
        "of 512, p99 TTFT of the short",
        latency(
            "ttft_p99",
            "questions and documents",
            "bucketed:token_budget=512",
            "chunked:token_budget=512",
            "short",
        ),
        "change",
        (0.005, 0.1),
        "The order ends the queueing behind documents, if documents are read in pieces.",
    ),
    Claim(
        "cpu-bucket-ttft",
        "BucketServe: short prompts first",
        "A",
        "short requests bypass long ones, no number",
        "bundled torch engine, shape `tiny`, one CPU core; `bucketed` over `chunked`, p99 TTFT of "
        "the short, three seeds",
        Recorded((0.0617, 0.0536, 0.0378), CPU),
        "change",
        (0.02, 0.2),
        "The same on a real engine.",
    ),
    Claim(
        "bucket-capacity",
        "BucketServe",
        "A",
        "1.93 × load at 80 % SLO attainment",
        "prompts of 64 to 256 (90 %) and 4 000 to 16 000 tokens; `bucketed` over `chunked`, the "
        "highest rate at which 80 % have TTFT ≤ 0.5 s and TPOT ≤ 50 ms",
        CapacityQuotient(Side("two lengths", "bucketed"), Side("two lengths", "chunked"), 0.8, 9),
        "times",
        (1.05, 1.3),
        "The paper compared with DistServe on a cluster, and saved padding. Kernels without "
        "padding leave the gain of the order.",
    ),
    Claim(
        "sjf-median",
        "shortest job first, length predicted",
        "D",
        "short requests first, no number",
        "22 req/s on 32 rows, a tenant with short and one with long answers; `sjf` over "
        "`chunked`, p50 E2E",
        latency("e2e_p50", "two kinds of answers", "sjf", "chunked", max_num_seqs="32"),
        "change",
        (0.1, 0.8),
        "A gain where requests queue for rows and the predictor can tell tenants apart.",
    ),
    Claim(
        "sjf-tail",
        "shortest job first, length predicted",
        "D",
        "no starvation of long requests",
        "the same, p99 E2E",
        latency("e2e_p99", "two kinds of answers", "sjf", "chunked", max_num_seqs="32"),
        "times",
        (1.2, 2),
        "Long answers pay for it: aging bounds the price, and does not remove it.",
    ),
    Claim(
        "priority-naive",
        "priority scores of mixed units",
        "C",
        "wait × 1 + 0.5 / remaining + priority × 2",
        "25 req/s of `mixed_classes`; `priority` (normalised) over `weighted_naive`, p99 E2E of "
        "completions",
        latency(
            "e2e_p99",
            "classes preset",
            "priority",
            "weighted_naive",
            "completion",
            prefix_cache="false",
        ),
        "times",
        (0.3, 1.5),
        "The normalised score serves them sooner here, if at all. The raw sum mixes seconds with "
        "1/tokens: its length term is worth half a second at most.",
    ),
    Claim(
        "token-fair",
        "token accounting per tenant (VTC)",
        "A",
        "fair and predictable, no number",
        "12 req/s, half from a tenant with documents of 8 000 tokens; `token_fair` over "
        "`chunked`, p99 TTFT of the light tenant",
        latency("ttft_p99", "two tenants", "token_fair", "chunked", "light"),
        "change",
        (0.01, 0.1),
        "Counting tokens per tenant keeps a light tenant's TTFT short beside a heavy tenant.",
    ),
)
