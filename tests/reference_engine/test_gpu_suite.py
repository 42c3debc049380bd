"""The GPU suite without a GPU: the message, the arithmetic and the flags. Its processes, merged
results and time limits are in `test_gpu_stages.py`; the whole suite runs at a small size in
`tests/e2e/test_gpu_suite_run.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_suite  # noqa: E402
from rig.gpu_ceilings import Ceilings, Place  # noqa: E402
from rig.gpu_experiments import GpuPart, parts_of_a_gpu  # noqa: E402
from rig.gpu_kernels import chunk_flops, decode_bytes  # noqa: E402
from rig.gpu_parts import extrapolated_s, mixed_batches  # noqa: E402
from rig.gpu_peer import common_step_s  # noqa: E402
from rig.gpu_results import PartResult, markdown  # noqa: E402
from rig.gpu_server import Mix, mixed_requests, tokens_per_s  # noqa: E402
from rig.gpu_session import Session  # noqa: E402
from rig.gpu_stages import PARTS, STAGES  # noqa: E402
from rig.gpu_sweep import CHUNKS, DECODES, SCALINGS, Times, choose, table_entry, tuning_with  # noqa: E402
from rig.gpu_tools import sanitizer_result  # noqa: E402

from reference_engine.kernels.tiles import Tuning  # noqa: E402
from reference_engine.model.zoo import SHAPES  # noqa: E402
from tests.reference_engine.cuda_stand_in import StandIn  # noqa: E402

H200 = Ceilings(4.3e12, 790e12)


@pytest.mark.parametrize(
    ("shape", "n_rows", "context", "milliseconds"),
    [("0.6b", 1, 1024, 0.30), ("0.6b", 256, 1024, 7.27), ("8b", 32, 1024, 4.49),
     ("8b", 256, 1024, 11.48)],
)  # fmt: skip
def test_the_least_time_of_a_decode_step_is_its_bytes_over_the_bandwidth(
    shape, n_rows, context, milliseconds
):
    roof_s = H200.decode_roof_s(SHAPES[shape], n_rows, context)
    assert roof_s * 1e3 == pytest.approx(milliseconds, abs=0.011)


def test_bytes_and_operations_of_the_attentions():
    config = SHAPES["8b"]
    # 2 (K and V) · 32 sequences · 1024 tokens · 8 heads · 128 numbers · 2 bytes
    assert decode_bytes(config, 32 * 1024, 2) == 134_217_728
    # 4 · 32 heads · 128 · (1 + 2 + 3 own positions + 3 · 10 before)
    assert chunk_flops(config, 3, 10) == 4 * 32 * 128 * 36


def test_the_least_time_of_a_workload_is_that_of_its_prompts_and_its_decode_steps():
    config = SHAPES["8b"]
    # Two at once, then the last alone; the third token of each comes with its second step.
    lengths = [(100, 3), (100, 3), (200, 2)]
    pair_s = 2 * H200.decode_roof_s(config, 2, 102)
    alone_s = H200.decode_roof_s(config, 1, 202)
    flops = 0.0
    for n in (100, 100, 200):
        inner = config.n_layers * 4 * config.n_heads * config.head_dim * n * n / 2
        blocks = SHAPES["8b"].n_params - 2 * config.vocab_size * config.d_model
        flops += 2 * blocks * n + 2 * config.vocab_size * config.d_model + inner
    roof_s = H200.work_roof_s(config, lengths, n_rows=2)
    assert roof_s == pytest.approx(pair_s + alone_s + flops / 790e12, rel=1e-3)


def test_steps_between_measured_contexts_lie_on_a_line():
    assert extrapolated_s({10: 1.0, 20: 3.0}, 20) == pytest.approx(
        9 * 1.0 + 1.0 + 1.2 + 1.4 + 1.6 + 1.8 + 2.0 + 2.2 + 2.4 + 2.6 + 2.8 + 3.0
    )


def test_throughput_counts_from_the_first_scheduled_send_to_the_last_token():
    assert tokens_per_s([[0.0, 0.1, 1.0, 3.0, 10], [2.0, 2.0, 3.0, 6.0, 20]]) == 5.0


def test_mixed_batches_have_a_long_row_among_short_rows():
    batches = mixed_batches(1)
    assert batches["a row of 32 k among 63 of 1 k"] == [32_768, *[1024] * 63]
    assert [len(contexts) for contexts in batches.values()] == [64, 32, 256]
    spread = batches["256 rows of 256 to 8 k"]
    assert (spread[0], spread[-1]) == (256, 8192)


def test_every_mode_and_the_calibration_have_the_same_mix():
    sizes = mixed_requests(4000, Mix())
    prompts, outputs = zip(*sizes, strict=True)
    assert sum(prompt == 3500 for prompt in prompts) == pytest.approx(400, abs=60)
    short = {*prompts} - {3500}
    assert (min(short), max(short)) == (50, 349)
    assert (min(outputs), max(outputs)) == (50, 250)
    assert sizes == mixed_requests(4000, Mix())


def test_the_table_lists_missed_goals_missing_parts_and_failures():
    row = dict.fromkeys(
        ("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s"), 0.25
    )
    part = {
        "date": "2030-01-01T10:00:00+00:00", "commit": "0" * 40, "seconds": 61.4, "state": "done",
        "readings": {"driver_version": "580.1", "power.draw": {"median": 600, "min": 90,
                     "max": 700}},
        "figures": {"modes": {"rate_per_s": 9.0, "of": {"chunked": row}}},
        "failures": {"http": "RuntimeError: the server did not start"},
        "goals": [{"name": "x", "value": 0.5, "unit": "of roof", "goal": ">= 0.6", "met": False,
                   "label": "9 ms, paged|sdpa"}],
    }  # fmt: skip
    content = {"device": "NVIDIA H200", "date": "2030-01-01", "missing": ["sanitizer"],
               "parts": {"modes": part}}  # fmt: skip
    text = markdown(content)
    assert "| x | 0.5 of roof | >= 0.6 | **no** | 9 ms, paged\\|sdpa |" in text
    assert "- **missing**: sanitizer" in text
    assert "- **failed**: http: RuntimeError: the server did not start" in text
    assert "| chunked | 0 | 250.0 | 250.0 | 250.00 | 250.00 |" in text
    assert (
        "| modes | 2030-01-01T10:00:00+00:00 | 000000000000 | 61 | done | – | 600 [90, 700] | – | "
        "580.1 |" in text
    )


def test_without_a_gpu_it_prints_a_message_exits_0_and_writes_nothing(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("PATH", "")
    assert gpu_suite.main(["--out", str(tmp_path / "out")]) == 0
    assert "no CUDA device here, nothing was measured" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flag", ["--only", "--skip"])
def test_an_unknown_part_is_rejected_with_the_nearest_name(flag, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_suite.main([flag, "ceilings,kernel"])
    assert ended.value.code == 2
    assert f"argument {flag}: unknown part 'kernel'; did you mean 'kernels'?" in (
        capsys.readouterr().err
    )


def test_the_ceilings_cannot_be_skipped(capsys):
    with pytest.raises(SystemExit):
        gpu_suite.main(["--skip", "http,ceilings"])
    assert "argument --skip: ceilings are always measured" in capsys.readouterr().err


def test_the_limits_of_a_stage_fit_into_seven_minutes():
    """With setup and the time that interrupted parts have to stop."""
    assert list(STAGES) == [1, 2, 3]
    assert all(sum(parts.values()) <= 400 for parts in STAGES.values())
    assert all(next(iter(parts)) == "ceilings" for parts in STAGES.values())
    from rig.gpu_part import PARTS as functions

    assert tuple(functions) == PARTS


def test_the_fastest_sizes_of_each_group_are_proposed_for_the_device():
    """By the geometric mean over the cases; 1 % is no reason to change; a group whose default
    failed has nothing to compare with."""
    decodes: Times = [
        ({}, [2.0, 9.0]), ({"decode_keys": 32}, [1.0, 9.0]), ({"decode_stages": 4}, [1.25, 5.76]),
        ({"decode_warps": 8}, [10.0, 3.0]),
    ]  # fmt: skip
    changes, gains = choose(
        {
            "decode": decodes,
            "chunk": [({}, [1.01]), ({"chunk_rows": 128}, [1.0])],
            "8-bit KV": [({"dequantise": True}, [1.0])],
        }
    )
    assert changes == {"decode_stages": 4}
    assert gains == {"decode": pytest.approx(2.5**0.5)}
    entry = table_entry("NVIDIA H100 80GB HBM3", {"decode_keys": 32, "dequantise": True})
    assert entry == '"H100": Tuning(decode_keys=32, dequantise=True),'
    assert eval(f"{{{entry}}}", {"Tuning": Tuning}) == {"H100": Tuning(32, dequantise=True)}


def test_every_candidate_is_a_tuning_and_the_first_the_default():
    for group in (DECODES, CHUNKS, SCALINGS):
        assert [tuning_with(changes) == Tuning() for changes in group] == [
            True, *[False] * (len(group) - 1)
        ]  # fmt: skip


def small_gpu() -> Place:
    """A stand-in for a GPU, with goals and results, that computes on the CPU."""
    return Place("cpu", torch.float32, 64, cuda=StandIn())


def session(tmp_path, place: Place) -> Session:
    return Session(place, tmp_path, PartResult(tmp_path / "part.json"))


def test_a_row_that_fails_is_recorded_and_the_next_rows_count(tmp_path):
    part = session(tmp_path, small_gpu())
    assert part.attempt("a", lambda: part.results.add_row("rows", 1))
    assert not part.attempt("b", lambda: [][0])
    assert part.attempt("c", lambda: part.results.add_row("rows", 3))
    on_disk = json.loads((tmp_path / "part.json").read_text())
    assert on_disk["figures"]["rows"] == [1, 3]
    assert on_disk["failures"] == {"b": "IndexError: list index out of range"}


def test_a_device_that_accepts_no_more_work_ends_the_part(tmp_path):
    place = small_gpu()

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    part = session(tmp_path, place)
    part.results.add_row("rows", 1)
    place.cuda.synchronize = lost
    with pytest.raises(RuntimeError, match="illegal memory access"):
        part.attempt("b", lambda: [][0])
    on_disk = json.loads((tmp_path / "part.json").read_text())
    assert on_disk["figures"]["rows"] == [1]
    assert on_disk["failures"] == {"b": "IndexError: list index out of range"}


def test_each_figure_is_on_disk_before_the_next_is_measured(tmp_path):
    results = PartResult(tmp_path / "part.json")
    results.add("answer", 42)
    results.add_goal("speed", 0.7, 0.6, "of roof", label="9 ms")
    on_disk = json.loads((tmp_path / "part.json").read_text())
    assert on_disk["figures"] == {"answer": 42}
    assert on_disk["goals"][0] == {
        "name": "speed", "value": 0.7, "goal": ">= 0.6", "unit": "of roof", "met": True,
        "label": "9 ms",
    }  # fmt: skip


def test_the_sanitizer_result_is_clean_only_if_tests_passed():
    clean = "========= ERROR SUMMARY: 0 errors"
    assert sanitizer_result(0, f"12 passed, 3 skipped in 9s\n{clean}") == "clean: 12 tests"
    races = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
    assert sanitizer_result(0, f"4 passed in 9s\n========= {races}") == "clean: 4 tests"
    assert sanitizer_result(1, "Device not supported") == "not run: Device not supported"
    for code, output in [
        (5, f"no tests ran in 0.1s\n{clean}"), (0, f"2 skipped in 0.1s\n{clean}"),
        (1, f"1 failed, 11 passed in 9s\n{clean}"), (0, "12 passed\nERROR SUMMARY: 3 errors"),
        (0, "4 passed\nRACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)"),
    ]:  # fmt: skip
        with pytest.raises(RuntimeError, match="exit code"):
            sanitizer_result(code, output)


class RecordedStream:
    """A stream whose work is done at the first `query` and is not at later ones, until it is waited
    for; the calls are recorded."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self._calls, self._n = name, calls, 0

    def query(self) -> bool:
        self._calls.append(f"is {self.name} done?")
        self._n += 1
        return self._n == 1

    def synchronize(self) -> None:
        self._calls.append(f"wait for {self.name}")


def test_a_part_of_the_gpu_is_measured_while_the_other_works_from_begin_to_end():
    place = small_gpu()
    calls = place.cuda.calls
    place.cuda.Stream = lambda device: RecordedStream("whole", calls)

    def split(n):
        memory, products = (RecordedStream(name, calls) for name in ("memory", "products"))
        return GpuPart(n, memory), GpuPart(132 - n, products)

    rows = parts_of_a_gpu(place, split)
    assert not isinstance(rows, str)
    assert [row["processors"] for row in rows] == [[132, 132], [32, 100], [64, 68], [96, 36]]
    assert all(row["together"] > 0 for row in rows)
    last = calls[calls.index("is products done?") :]
    round_of_calls = ["on products", "off products", "on memory", "off memory", "wait for memory"]
    # The other part was done first: with more work, it outlasts the measured part.
    assert last[1:7] == [*round_of_calls, "is products done?"]


def test_parts_that_the_driver_refuses_are_recorded_as_not_run():
    def refuse(n):
        raise RuntimeError("cuGreenCtxCreate: CUDA_ERROR_NOT_SUPPORTED")

    assert (
        parts_of_a_gpu(small_gpu(), refuse) == "not run: cuGreenCtxCreate: CUDA_ERROR_NOT_SUPPORTED"
    )


def test_steps_of_a_peer_are_counted_while_all_rows_decode():
    # Together from 3.0 to 5.0: four steps of the faster row.
    rows = [[1.0, 2.0, 3.0, 3.5, 4.0, 4.5, 5.0], [3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0]]
    assert common_step_s(rows) == pytest.approx(0.5)
    with pytest.raises(RuntimeError, match="never decoded together"):
        common_step_s([[1.0, 2.0], [3.0, 4.0]])
