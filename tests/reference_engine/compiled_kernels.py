"""Compile every kernel for an H100 or H200 (sm_90), which needs no GPU, and count instructions.

Code that only the interpreter accepts fails here. To be fast, attention must read its memory in
16-byte pieces, asynchronously, multiply on tensor cores, and keep its values in registers. Run by
`tests/e2e/test_kernels_run.py`; prints a JSON object {kernel: {instruction: count}}, for attention
with the bytes that NVIDIA's assembler spilled.
"""

from __future__ import annotations

import json
import re
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from reference_engine.kernels import paged_attention, pointwise, rope, token_sampling

# The PTX, the log of NVIDIA's assembler, and the bytes of shared memory of a program.
Compiled = tuple[str, str, int]
HOPPER = GPUTarget("cuda", 90, 32)
INSTRUCTIONS = (
    "mma.sync",
    "wgmma.mma_async",
    "cp.async",
    "ld.global.b16",
    "ld.global.b8",
    "st.local",
    "ld.local",
)
B, F, INT, LONG = "*bf16", "*fp32", "*i32", "*i64"


def compiled(fn: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> Compiled:
    """`fn` compiled, with pointers and strides that are multiples of
    16, as torch's are."""
    signature = {name: types.get(name, "constexpr") for name in fn.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(fn.arg_names)
        if signature[name].startswith("*") or name == "table_width"
    }
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attrs)
    with redirect_stdout(StringIO()) as log:
        kernel = triton.compile(source, target=HOPPER, options=options)
    return kernel.asm["ptx"], log.getvalue(), kernel.metadata.shared


def all_kernels() -> dict[str, Compiled]:
    """Each kernel, as the 8b shape launches them. Kernels that read or write
    KV come also with KV in 8 bits, with a suffix."""
    kernels = _pointwise()
    for suffix, kv, largest in (("", B, 0.0), ("_int8", "*i8", 127.0), ("_fp8", "*fp8e4nv", 448.0)):
        kernels |= {f"{name}{suffix}": made for name, made in _over_kv(kv, largest).items()}
    return kernels


def _over_kv(kv: str, largest: float) -> dict[str, Compiled]:
    heads = {
        "N_KV": 8,
        "GROUP": 4,
        "HEAD": 128,
        "PAGE": 16,
        "KEYS": 64,
        "SCALING": int(largest > 0),
    }
    cache = {"cache": kv, "scales": F if largest else kv}
    read = cache | {"q": B, "tables": INT, "out": B, "scale": "fp32", "table_width": "i32"}
    parts = {"part": F, "peaks": F, "sums": F}
    qkv = {"qkv": B, "positions": INT, "slots": INT, "cosines": F, "sines": F, "qk_norm": B}
    work = {"rows": INT, "bounds": INT, "items": INT}
    behind = {"tiles": INT, "q_tiles": B, "out_tiles": B, "n_programs": "i32"}
    rope_constants = {"N_Q": 32, "N_KV": 8, "PAGE": 16, "HEAD": 128, "HAS_NORM": True}
    keep = {"LARGEST": largest, "SMALLEST": 1e-20, "IS_INT": kv == "*i8"}
    return {
        "decode": compiled(
            paged_attention.decode_kernel,
            read | parts | work,
            heads | {"ROWS": 16},
            num_warps=4,
            num_stages=3,
        ),
        "chunk": compiled(
            paged_attention.chunk_kernel,
            read | {"tiles": INT},
            heads | {"ROWS": 64},
            num_warps=4,
            num_stages=2,
        ),
        "decode_narrow": compiled(
            paged_attention.decode_kernel,
            read | parts | work,
            heads | {"ROWS": 16, "KEYS": 32},
            num_warps=4,
            num_stages=5,
        ),
        "chunk_tall": compiled(
            paged_attention.chunk_kernel,
            read | {"tiles": INT},
            heads | {"ROWS": 128},
            num_warps=8,
            num_stages=2,
        ),
        **(_dequantising(read, parts | work, heads) if largest else {}),
        "fused": compiled(
            paged_attention.fused_kernel,
            read | parts | work | behind,
            heads | {"DECODE_ROWS": 16, "TILE_ROWS": 64},
            num_warps=4,
            num_stages=2,
        ),
        "rope": compiled(
            rope.rope_kernel,
            qkv | cache | {"q": B, "eps": "fp32"},
            rope_constants | keep,
            num_warps=1,
        ),
    }


def _dequantising(
    read: dict[str, str], decode: dict[str, str], heads: dict[str, Any]
) -> dict[str, Compiled]:
    """With 8-bit keys and values multiplied by their scales before the products."""
    heads = heads | {"SCALING": 2}
    return {
        "decode_dequantised": compiled(
            paged_attention.decode_kernel,
            read | decode,
            heads | {"ROWS": 16},
            num_warps=4,
            num_stages=3,
        ),
        "chunk_dequantised": compiled(
            paged_attention.chunk_kernel,
            read | {"tiles": INT},
            heads | {"ROWS": 64},
            num_warps=4,
            num_stages=2,
        ),
    }


def _pointwise() -> dict[str, Compiled]:
    parts = {"part": F, "peaks": F, "sums": F}
    draw = {"logits": F, "temperatures": F, "keys": INT, "n_vocab": "i32", "n_parts": "i32"}
    best = {"best": F, "where": INT}
    return {
        "decode_join": compiled(
            paged_attention.join_kernel,
            parts | {"out": B, "joins": INT},
            {"N_Q": 32, "GROUP": 4, "HEAD": 128, "PARTS": 16},
            num_warps=1,
        ),
        "norm": compiled(
            pointwise.norm_kernel,
            {"residual": B, "delta": B, "weight": B, "out": B, "eps": "fp32"},
            {"WIDTH": 4096, "BLOCK": 4096, "HAS_DELTA": True},
            num_warps=8,
        ),
        "silu": compiled(
            pointwise.silu_kernel, {"gate_up": B, "out": B}, {"WIDTH": 14336, "BLOCK": 1024}
        ),
        "sample": compiled(token_sampling.part_kernel, draw | best, {"BLOCK": 4096}, num_warps=8),
        "sample_join": compiled(
            token_sampling.best_kernel,
            best | {"tokens": LONG, "n_parts": "i32"},
            {"BLOCK": 64},
            num_warps=1,
        ),
    }


def spilled_bytes(log: str) -> int:
    """Bytes that the assembler spilled, by its log."""
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if spills is None:
        raise RuntimeError(f"no spilled bytes in the assembler's log: {log}")
    return int(spills[1]) + int(spills[2])


def registers(log: str) -> int:
    """Registers of a thread, by the assembler's log."""
    used = re.search(r"Used (\d+) registers", log)
    if used is None:
        raise RuntimeError(f"no registers in the assembler's log: {log}")
    return int(used[1])


if __name__ == "__main__":
    triton.knobs.nvidia.dump_ptxas_log = True
    counts = {}
    for name, (ptx, log, shared_bytes) in all_kernels().items():
        counts[name] = {word: ptx.count(word) for word in INSTRUCTIONS}
        if name.startswith(("decode", "chunk", "fused")):
            counts[name]["spilled"] = spilled_bytes(log)
            counts[name] |= {"registers": registers(log), "shared_bytes": shared_bytes}
    print(json.dumps(counts))  # noqa: T201 - read by the test
