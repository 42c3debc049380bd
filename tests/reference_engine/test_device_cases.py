"""The checks of `tests/gpu`, rehearsed on the CPU with plain kernels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from reference_engine.executors.cuda_stream import CpuStream  # noqa: E402 - only with torch
from reference_engine.model.zoo import SHAPES  # noqa: E402
from reference_engine.state.plan import How  # noqa: E402
from tests.reference_engine import device_cases as cases  # noqa: E402

CPU = cases.Device(CpuStream(), "plain", torch.float32)
FLAGS = ["--device", "cuda", "--shape", "nano", "--http-workers", "0", "--max-model-len", "256"]
FLAGS += [word for knob in ("on=cpu", "kernels=plain", "dtype=float32", "max_num_seqs=8",
                            "kv_blocks=64", "async_depth=1")
          for word in ("--set", knob)]  # fmt: skip
BREAKING = Path(__file__).with_name("breaking_mode.py")


def test_graphs_compute_what_launches_compute_at_every_bucket():
    shorts = cases.graph_shortfalls(CPU, SHAPES["nano"], 33, 1)
    assert len(shorts) == 1 + 1 + 2 + 3 + 4 + 7 + 8 + 15 + 16 + 31 + 32 + 32 + 33
    assert max(shorts) <= 1e-4


@pytest.mark.parametrize("how", [How.recompute, How.swap])
def test_delayed_copies_change_no_token(how):
    delays: list[int] = []
    first = cases.delayed_answers(CPU, lambda: delays.append(1), how)
    assert len(delays) > 100
    assert first == cases.delayed_answers(CPU, lambda: None, how)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_swapped_blocks_with_shared_prefixes_keep_their_kv(kv_dtype):
    dtype = torch.float32 if kv_dtype == "auto" else torch.bfloat16
    cases.check_swap_with_shared_prefixes(cases.Device(CpuStream(), "plain", dtype), kv_dtype)


def test_builds_in_turn_keep_their_memory():
    def used_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    cases.check_builds_in_turn(CPU, used_bytes, 4)


def test_the_top_blocks_are_written_and_read_as_the_first():
    cases.check_top_blocks(CPU, 9)


def test_tokens_through_http_are_those_of_this_process():
    cases.check_tokens_through_http(CPU, FLAGS)


def test_an_error_in_a_run_reaches_the_streams_and_the_exit_code():
    """Without graphs: those of the CPU refer to the executor, so that it could not be freed."""
    flags = [*FLAGS, "--set", "graphs=false"]
    cases.check_error_in_a_run(BREAKING, flags, "IndexError: index 5 is out of bounds")
