"""The GPU suite without a GPU: the message, the arithmetic, the flags and the time limits. The
whole suite runs at a small size in `tests/e2e/test_gpu_suite_run.py`."""

from __future__ import annotations

import json
import signal
import subprocess
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
from rig.gpu_parts import extrapolated_s  # noqa: E402
from rig.gpu_peer import common_step_s  # noqa: E402
from rig.gpu_results import Results, markdown  # noqa: E402
from rig.gpu_server import tokens_per_s  # noqa: E402
from rig.gpu_session import Budget, BudgetExceeded  # noqa: E402
from rig.gpu_tools import sanitizer_result  # noqa: E402

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
    assert decode_bytes(config, 32, 1024, 2) == 134_217_728
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


def test_the_table_lists_missed_goals_missing_parts_and_failures():
    content = {
        "gpu": {"name": "NVIDIA H200"}, "date": "2030-01-01", "commit": "0" * 40,
        "versions": {"torch": "2.11", "cuda": "13.0"}, "seconds": {"a": 61.4},
        "failures": {"http": "RuntimeError: the server did not start"},
        "missing": ["sanitizer"],
        "goals": [{"name": "x", "value": 0.5, "unit": "of roof", "goal": ">= 0.6", "met": False,
                   "label": "9 ms, paged|sdpa"}],
        "modes": {"rate_per_s": 9.0, "of": {"chunked": dict.fromkeys(
            ("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s"), 0.25)}},
    }  # fmt: skip
    text = markdown(content)
    assert "| x | 0.5 of roof | >= 0.6 | **no** | 9 ms, paged\\|sdpa |" in text
    assert "- **partial**: without sanitizer" in text
    assert "- **failed**: http: RuntimeError: the server did not start" in text
    assert "| chunked | 0 | 250.0 | 250.0 | 250.00 | 250.00 |" in text


def test_without_a_gpu_it_prints_a_message_exits_0_and_writes_nothing(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
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


@pytest.fixture
def parts(monkeypatch):
    """Every part only records that it ran."""
    ran: list[str] = []
    for name in gpu_suite.PARTS:
        monkeypatch.setitem(
            gpu_suite.PARTS, name, (lambda session, name=name: ran.append(name), 60)
        )
    return ran


def small_gpu() -> Place:
    """A stand-in for a GPU, with goals and results, that computes on the CPU."""
    return Place("cpu", torch.float32, 64, cuda=StandIn())


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        (["--only", "kernels"], ["ceilings", "kernels"]),
        (["--only", "sanitizer,http"], ["ceilings", "http", "sanitizer"]),
        (["--skip", "http,tests,sanitizer"],
         ["ceilings", "kernels", "decode_steps", "throughput", "transformers"]),
    ],
)  # fmt: skip
def test_chosen_parts_run_after_the_ceilings_and_leave_a_partial_result(
    flags, chosen, parts, tmp_path
):
    assert gpu_suite.main([*flags, "--out", str(tmp_path)], small_gpu()) == 0
    assert parts == chosen
    assert {path.suffixes[-2] for path in tmp_path.glob("gpu-h200*")} == {".partial"}
    (path,) = tmp_path.glob("*.json")
    results = json.loads(path.read_text())
    assert results["missing"] == [name for name in gpu_suite.PARTS if name not in chosen]
    assert list(results["seconds"]) == chosen


@pytest.mark.parametrize("flags", [[], ["--only", ",".join(reversed(gpu_suite.PARTS))]])
def test_all_parts_leave_a_complete_result(flags, parts, tmp_path):
    assert gpu_suite.main([*flags, "--out", str(tmp_path)], small_gpu()) == 0
    assert parts == list(gpu_suite.PARTS)
    names = {path.name[len("gpu-h200-2026-11-23") :] for path in tmp_path.glob("gpu-h200*")}
    assert names == {".json", ".md"}


def test_parts_do_not_start_after_the_budget_and_are_recorded_as_failures(parts, tmp_path):
    assert gpu_suite.main(["--budget=-1", "--out", str(tmp_path)], small_gpu()) == 1
    assert parts == []
    (path,) = tmp_path.glob("gpu-h200*.json")
    failures = json.loads(path.read_text())["failures"]
    assert list(failures) == list(gpu_suite.PARTS)
    assert failures["http"] == "not started: the budget of -1 s was over 1 s ago"
    assert gpu_suite.main(["--budget=-1", "--long", "--out", str(tmp_path)], small_gpu()) == 0


def test_each_figure_is_on_disk_before_the_next_is_measured(parts, tmp_path, monkeypatch):
    """A run that is killed loses no figure."""
    on_disk = {}

    def measure(session):
        session.results.add("answer", 42)
        session.results.add_goal("speed", 0.7, 0.6, "of roof", label="9 ms")
        (path,) = tmp_path.glob("*.partial.json")
        on_disk.update(json.loads(path.read_text()))

    monkeypatch.setitem(gpu_suite.PARTS, "kernels", (measure, 60))
    gpu_suite.main(["--out", str(tmp_path)], small_gpu())
    assert on_disk["answer"] == 42
    assert on_disk["goals"][0] == {
        "name": "speed", "value": 0.7, "goal": ">= 0.6", "unit": "of roof", "met": True,
        "label": "9 ms",
    }  # fmt: skip
    assert on_disk["missing"][0] == "kernels"
    assert list(tmp_path.glob("*.partial.*")) == []


def test_a_part_that_takes_too_long_is_interrupted_and_the_next_one_runs(
    parts, tmp_path, monkeypatch
):
    def stuck(session):
        session.results.add("before", 1)
        subprocess.run(["sleep", "60"], check=False)

    monkeypatch.setitem(gpu_suite.PARTS, "kernels", (stuck, 0.05))
    assert gpu_suite.main(["--out", str(tmp_path)], small_gpu()) == 1
    (path,) = tmp_path.glob("*.json")
    results = json.loads(path.read_text())
    assert results["failures"] == {"kernels": "interrupted after 0 s"}
    assert results["before"] == 1
    assert parts == [name for name in gpu_suite.PARTS if name != "kernels"]


def test_code_that_catches_every_exception_is_interrupted_too():
    def catch_all():
        while True:
            try:
                while True:
                    pass
            except Exception:
                continue

    with pytest.raises(BudgetExceeded, match="interrupted after 0 s"), Budget(0.05).limited(60):
        catch_all()


def test_a_budget_restores_the_earlier_timer():
    before = signal.getsignal(signal.SIGALRM)
    with Budget(60).limited(60):
        assert signal.getsignal(signal.SIGALRM) is not before
    assert signal.getsignal(signal.SIGALRM) is before


def test_without_git_the_commit_is_that_of_the_environment_or_unknown(monkeypatch):
    monkeypatch.delenv("SLOBENCH_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert Results(small_gpu(), ()).commit == "unknown"
    monkeypatch.setenv("SLOBENCH_COMMIT", "abc123")
    assert Results(small_gpu(), ()).commit == "abc123"


def test_the_sanitizer_result_is_clean_only_if_tests_passed():
    clean = "========= ERROR SUMMARY: 0 errors"
    assert sanitizer_result(0, f"12 passed, 3 skipped in 9s\n{clean}") == "clean: 12 tests"
    assert sanitizer_result(1, "Device not supported") == "not run: Device not supported"
    for code, output in [
        (5, f"no tests ran in 0.1s\n{clean}"), (0, f"2 skipped in 0.1s\n{clean}"),
        (1, f"1 failed, 11 passed in 9s\n{clean}"), (0, "12 passed\nERROR SUMMARY: 3 errors"),
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
