"""Sides of comparisons: settings and measurements that several rows share."""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.studies.claims.claim import Claim, Quotient, Side, Untested

GPU = "gpu-h200-2026-11-26.json"
CPU = "orderings_cpu.json"
TOKENS = "output_tokens_per_s"
ON_4_H200S = {"shape": "70b", "hardware": "4xh200"}
LITTLE_KV = {"kv_blocks": "8000"}
UNCACHED = {"prefix_cache": "false"}
DECODE_REPLICAS = {
    "hardware": "a100",
    "replicas": "2:role=prefill+3:role=decode",
    "router": "jsq",
    "kv_blocks": "8000",
}
APART = {"replicas": "1:role=prefill+1:role=decode", "link_bytes_per_s": "5e9"}
A100S = {"replicas": "4", "hardware": "a100", "max_num_seqs": "16"}
Bounds = tuple[float | None, float | None]
ANY: Bounds = (None, None)


def tokens(workload: str, ours: str, other: str, **settings: str) -> Quotient:
    """Output tokens per second of two modes with the same settings."""
    return Quotient(Side(workload, ours, settings), Side(workload, other, settings), TOKENS)


def latency(
    quantity: str, workload: str, ours: str, other: str, part: str = "", **settings: str
) -> Quotient:
    return Quotient(Side(workload, ours, settings), Side(workload, other, settings), quantity, part)


def setting(
    quantity: str,
    workload: str,
    ours: Mapping[str, str],
    other: Mapping[str, str],
    mode: str = "chunked",
) -> Quotient:
    """The same mode with two sets of settings."""
    return Quotient(Side(workload, mode, ours), Side(workload, mode, other), quantity)


def untested(key: str, system: str, source: str, claimed: str, reason: str) -> Claim:
    return Claim(key, system, source, claimed, "–", Untested(reason), "number", ANY, reason)


MIX = "short and 5 % of 16 000"
