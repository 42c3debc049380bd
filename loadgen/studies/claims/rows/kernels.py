"""Kernels, and parts of a GPU."""

from __future__ import annotations

from loadgen.studies.claims.claim import Claim, Recorded
from loadgen.studies.claims.rows.sides import GPU, setting

KERNELS: tuple[Claim, ...] = (
    Claim(
        "pod-latency",
        "POD-Attention",
        "D",
        "prompts do not block decodes; in its paper up to 22 % end to end",
        "20 req/s, 15 % documents of 8 000 tokens; attention of both at the same time at 85 % "
        "efficiency, p50 E2E",
        setting("e2e_p50", "questions and documents", {"fused_attention": "85%"}, {}),
        "change",
        (0.75, 1.05),
        "An effect on steps with long prompts only; the efficiency is assumed.",
    ),
    Claim(
        "gpu-pod",
        "POD-Attention",
        "D",
        "prompts do not block decodes",
        "H200, attention of a layer for prompts and decodes; one launch over two, time",
        Recorded((0.00023589472499949694 / 0.000234175375000234,), GPU),
        "change",
        (0.95, 1.05),
        "No gain with our own kernel, which is off by default.",
    ),
    Claim(
        "gpu-overlap",
        "Nexus: parts of a GPU",
        "D",
        "resources decoupled within a GPU",
        "H200, a copy on 32 and a product on 100 multiprocessors, over taking turns; throughput",
        Recorded((1.2020754226277774,), GPU),
        "times",
        (1.1, 1.3),
        "The best of four divisions; the others gained 2 % or lost.",
    ),
    Claim(
        "nexus-tpot",
        "Nexus: parts of a GPU",
        "P",
        "TBT 2.5 × shorter",
        "12 req/s, 15 % documents of 8 000 tokens; `split=auto` over `chunked`, p99 TPOT",
        setting("tpot_p99", "documents, few", {"split": "auto"}, {}),
        "change",
        (0.25, 0.6),
        "Decodes are steadier.",
    ),
    Claim(
        "nexus-ttft",
        "Nexus: parts of a GPU",
        "P",
        "TTFT up to 20 × shorter",
        "the same, p99 TTFT",
        setting("ttft_p99", "documents, few", {"split": "auto"}, {}),
        "times",
        (1.8, 5),
        "The opposite here: prompts have a part of the GPU only. Nexus compares with vLLM and has "
        "a scheduler of its own for each phase.",
    ),
    Claim(
        "gpu-utilisation",
        "utilisation of the GPU",
        "D",
        "92 %",
        "H200, decode step of 8B with 256 rows: share of the roofline",
        Recorded((0.766,), GPU),
        "share",
        (0.7, 0.85),
        "The utilisation that tools print counts time with any kernel; static batches reach 100 % "
        "of it under load. The share of the roofline is what can be compared.",
    ),
)
