"""Compile every kernel for an H100 or H200 (sm_90), which needs no GPU, and count instructions.

Code that only the interpreter accepts fails here. To be fast, attention must read its memory in
16-byte pieces, asynchronously, multiply on tensor cores, and keep its values in registers. Run by
`test_kernels.py`; prints a JSON object {kernel: {instruction: count}}, for attention with the bytes
that NVIDIA's assembler spilled.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from reference_engine.kernels import paged_attention, pointwise, rope, token_sampling

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


def compiled(fn: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> str:
    """The PTX of `fn`, with pointers and strides that are multiples of 16, as torch's are."""
    signature = {name: types.get(name, "constexpr") for name in fn.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(fn.arg_names)
        if signature[name].startswith("*") or name == "table_width"
    }
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attrs)
    ptx: str = triton.compile(source, target=HOPPER, options=options).asm["ptx"]
    return ptx


def all_kernels() -> dict[str, str]:
    """The PTX of the kernels, as the 8b shape launches them. Kernels that read or write KV come
    also with KV in 8 bits, with a suffix."""
    kernels = _pointwise()
    for suffix, kv, largest in (("", B, 0.0), ("_int8", "*i8", 127.0), ("_fp8", "*fp8e4nv", 448.0)):
        kernels |= {f"{name}{suffix}": ptx for name, ptx in _over_kv(kv, largest).items()}
    return kernels


def _over_kv(kv: str, largest: float) -> dict[str, str]:
    heads = {"N_KV": 8, "GROUP": 4, "HEAD": 128, "PAGE": 16, "KEYS": 64, "IS_SCALED": largest > 0}
    cache = {"cache": kv, "scales": F if largest else kv}
    read = cache | {"q": B, "tables": INT, "out": B, "scale": "fp32", "table_width": "i32"}
    parts = {"part": F, "peaks": F, "sums": F}
    qkv = {"qkv": B, "positions": INT, "slots": INT, "cosines": F, "sines": F, "qk_norm": B}
    behind = {"rows": INT, "contexts": INT, "tiles": INT, "n_rows": "i32"}
    behind |= {"q_tiles": B, "out_tiles": B}
    rope_constants = {"N_Q": 32, "N_KV": 8, "PAGE": 16, "HEAD": 128, "HAS_NORM": True}
    keep = {"LARGEST": largest, "SMALLEST": 1e-20, "IS_INT": kv == "*i8"}
    return {
        "decode": compiled(
            paged_attention.decode_kernel,
            read | parts | {"rows": INT, "contexts": INT},
            heads | {"ROWS": 16, "SPLITS": 4},
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
        "fused": compiled(
            paged_attention.fused_kernel,
            read | parts | behind,
            heads | {"DECODE_ROWS": 16, "TILE_ROWS": 64, "SPLITS": 4},
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


def _pointwise() -> dict[str, str]:
    parts = {"part": F, "peaks": F, "sums": F}
    draw = {"logits": F, "temperatures": F, "keys": INT, "n_vocab": "i32", "n_parts": "i32"}
    best = {"best": F, "where": INT}
    return {
        "decode_join": compiled(
            paged_attention.join_kernel, parts | {"out": B}, {"HEAD": 128, "SPLITS": 4}, num_warps=1
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


def spilled(ptx: str) -> int:
    """Spilled bytes, by the first of Triton's own assemblers that accepts this version of PTX."""
    error = ""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "kernel.ptx")
        source.write_text(ptx)
        for assembler in sorted(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*")):
            done = subprocess.run(
                [assembler, "-v", "--gpu-name=sm_90a", source, "-o", Path(directory, "cubin")],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
            if done.returncode == 0 and spills is not None:
                return int(spills[1]) + int(spills[2])
            error = done.stderr
    raise RuntimeError(error)


if __name__ == "__main__":
    ptx_of = all_kernels()
    counts = {
        name: {word: ptx.count(word) for word in INSTRUCTIONS} for name, ptx in ptx_of.items()
    }
    for name, ptx in ptx_of.items():
        if name.startswith(("decode", "chunk", "fused")):
            counts[name]["spilled"] = spilled(ptx)
    print(json.dumps(counts))  # noqa: T201 - read by the test
