"""Stages of the GPU suite: a process per part, time limits, merged results and the archive."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_suite  # noqa: E402
from rig.gpu_stages import Merged, Stage, commit, readings, slug  # noqa: E402

from loadgen.errors import UsageError  # noqa: E402
from tests.waits import wait_until  # noqa: E402

DEVICE = "NVIDIA H100 80GB HBM3"
STAND_IN = [sys.executable, "-m", "tests.reference_engine.gpu_part_stand_in"]


def command(name, result, merged, logs):
    return [*STAND_IN, name, str(result), str(merged), str(logs)]


def stage(tmp_path, budget_s=100.0, resumed=None, number=1, commit="abc") -> Stage:
    logs = tmp_path / "logs"
    logs.mkdir(exist_ok=True)
    merged = Merged.start(DEVICE, tmp_path / "out", resumed)
    return Stage(merged, number, logs, command, budget_s, commit, grace_s=1.0)


def on_disk(tmp_path):
    (path,) = (tmp_path / "out").glob("gpu-h100-*.json")
    return json.loads(path.read_text())


def test_a_cuda_error_that_kills_its_process_ends_one_part_only(tmp_path):
    assert not stage(tmp_path).run({"ceilings": 30, "kernels": 30, "tests": 30})
    parts = on_disk(tmp_path)["parts"]
    assert [part["state"] for part in parts.values()] == ["done", "failed", "done"]
    (reason,) = parts["kernels"]["failures"].values()
    assert reason.startswith("exit code -6: CUDA error: an illegal memory access")
    assert parts["kernels"]["figures"]["kernels"][0]["share"] == 0.8
    assert parts["tests"]["figures"]["tests"]["copy"] == 3e12
    assert parts["tests"]["relative_to"]["matmul_flops"] == 8e14
    assert parts["tests"]["commit"] == "abc"


def test_a_device_error_in_a_real_part_keeps_the_rows_before_it(tmp_path):
    assert not stage(tmp_path).run({"real": 60, "tests": 30, "ceilings": 30})
    parts = on_disk(tmp_path)["parts"]
    failures = parts["real"]["failures"]
    assert "illegal memory access" in " ".join(failures.values())
    assert len(parts["real"]["figures"]["decode_steps"]) == 3
    assert parts["ceilings"]["state"] == "done"


def test_a_part_that_takes_too_long_is_ended_with_its_processes(tmp_path):
    assert not stage(tmp_path).run({"decode_steps": 3, "ceilings": 30})
    parts = on_disk(tmp_path)["parts"]
    assert parts["decode_steps"]["state"] == "interrupted"
    assert parts["decode_steps"]["failures"] == {"decode_steps": "interrupted after 3 s"}
    assert parts["decode_steps"]["figures"]["decode_steps"][0]["rows"] == 32
    assert parts["ceilings"]["state"] == "done"
    child = int((tmp_path / "logs" / "child.pid").read_text())
    wait_until(lambda: not is_alive(child), 10, "the part's own process did not end")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_parts_do_not_start_after_the_budget_and_are_recorded_as_failures(tmp_path):
    assert not stage(tmp_path, budget_s=-1).run({"ceilings": 30, "tests": 30})
    parts = on_disk(tmp_path)["parts"]
    assert parts["tests"]["state"] == "skipped"
    assert parts["tests"]["failures"] == {"tests": "not started: the budget of -1 s is over"}


def test_a_killed_stage_leaves_its_rows_and_is_resumed(tmp_path):
    """SIGKILL to the suite while a part runs, as at the end of a lease."""
    program = (
        "import sys; from tests.reference_engine.test_gpu_stages import stage; "
        "from pathlib import Path; "
        "stage(Path(sys.argv[1])).run({'ceilings': 30, 'decode_steps': 60, 'tests': 30})"
    )
    suite = subprocess.Popen([sys.executable, "-c", program, tmp_path], cwd=ROOT, env=environment())

    def has_row() -> bool:
        paths = list((tmp_path / "out").glob("*.json"))
        parts = json.loads(paths[0].read_text())["parts"] if paths else {}
        return bool(parts.get("decode_steps", {}).get("figures"))

    try:
        wait_until(has_row, 60, "no row was merged")
    finally:
        suite.send_signal(signal.SIGKILL)
        suite.wait()
    child = int((tmp_path / "logs" / "child.pid").read_text())
    os.killpg(os.getpgid(child), signal.SIGKILL)  # the stand-in does not watch its parent
    (path,) = (tmp_path / "out").glob("*.json")
    resumed = stage(tmp_path, resumed=path, number=2)
    assert [name for name in resumed.merged.content["parts"] if resumed.merged.is_done(name)] == [
        "ceilings"
    ]
    assert resumed.run({"tests": 30})
    content = on_disk(tmp_path)
    assert content["parts"]["decode_steps"]["state"] == "running"
    assert content["parts"]["tests"]["stage"] == 2
    assert "decode_steps" not in content["missing"]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}"}


def test_stages_of_different_days_are_merged_into_one_result_of_the_device(tmp_path):
    stage(tmp_path, commit="first").run({"ceilings": 30, "tests": 30})
    (path,) = (tmp_path / "out").glob("*.json")
    earlier = path.with_name("gpu-h100-2026-01-02.json")
    earlier.write_text(path.read_text())
    path.unlink()
    other = tmp_path / "elsewhere"
    other.mkdir()
    merged = Merged.start(DEVICE, other, earlier)
    later = Stage(merged, 2, tmp_path / "logs", command, 100, "second", grace_s=1.0)
    later.run({"ceilings": 30, "http": 30})
    content = json.loads((other / "gpu-h100-2026-01-02.json").read_text())
    commits = {name: part["commit"] for name, part in content["parts"].items()}
    assert commits == {"ceilings": "second", "tests": "first", "http": "second"}
    assert [(part["part"], part["commit"]) for part in content["earlier"]] == [
        ("ceilings", "first")
    ]
    assert "modes" in content["missing"]
    assert {file.suffix for file in other.iterdir()} == {".json", ".md", ".tgz"}


def test_a_resumed_stage_repeats_the_ceilings_and_what_is_not_done(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    arguments = ["--stage", "2", *out]
    assert gpu_suite.main([*arguments, "--skip", "http"], command, DEVICE) == 0
    (path,) = tmp_path.glob("*.json")
    capsys.readouterr()
    assert gpu_suite.main([*arguments, "--resume", str(path)], command, DEVICE) == 0
    lines = capsys.readouterr().out.splitlines()
    started = [line.split(",")[0] for line in lines if line.startswith("== ")]
    assert started == ["== ceilings", "== http"]


def test_a_result_is_never_replaced_and_of_one_device(tmp_path, capsys):
    arguments = ["--only", "tests", "--out", str(tmp_path)]
    assert gpu_suite.main(arguments, command, DEVICE) == 0
    (path,) = tmp_path.glob("*.json")
    before = path.read_text()
    assert gpu_suite.main(arguments, command, DEVICE) == 2
    assert f"add to it with --resume {path}" in capsys.readouterr().err
    assert gpu_suite.main([*arguments, "--resume", str(path)], command, "NVIDIA H200") == 2
    assert "it is of NVIDIA H100 80GB HBM3, this device is NVIDIA H200" in capsys.readouterr().err
    assert path.read_text() == before
    path.write_text("[]")
    with pytest.raises(UsageError, match="not a result of the suite"):
        Merged.start(DEVICE, tmp_path, path)


@pytest.mark.parametrize(
    ("device", "name"),
    [(DEVICE, "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
     ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("Tesla T4", "t4"), ("NVIDIA", "gpu")],
)  # fmt: skip
def test_files_are_named_by_the_device(device, name):
    assert slug(device) == name


def test_the_archive_leaves_out_the_largest_logs_first(tmp_path):
    run = stage(tmp_path)
    run.merged.write()
    for name, size in (("small.txt", 100), ("large.bin", 60_000), ("larger.bin", 90_000)):
        (run.logs / name).write_bytes(random.Random(1).randbytes(size))
    assert run.merged.archive(run.logs, 80_000) == ["larger.bin"]
    target = run.merged.path.with_suffix(".tgz")
    assert target.stat().st_size <= 80_000
    with tarfile.open(target) as tar:
        stem = run.merged.stem
        assert set(tar.getnames()) == {
            f"{stem}.json", f"{stem}.md", "logs/small.txt", "logs/large.bin"
        }  # fmt: skip
    assert run.merged.archive(run.logs, 1) == ["larger.bin", "large.bin", "small.txt"]


def test_clocks_power_and_temperature_are_recorded_meanwhile(tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-lms*) while :; do echo "1755, 2619, 612.50, 61, 99"; sleep 0.1; done;;\n'
        '*) echo "580.65.06, 700.00, 1980, 81559";; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    stage(tmp_path).run({"ceilings": 30})
    known = on_disk(tmp_path)["parts"]["ceilings"]["readings"]
    assert known["driver_version"] == "580.65.06"
    assert known["clocks.sm"] == {"median": 1755, "min": 1755, "max": 1755}
    assert known["power.draw"]["max"] == 612.5
    assert known["temperature.gpu"]["min"] == 61


def test_readings_that_a_device_does_not_support_are_left_out():
    text = "1000, 2000, [N/A], 40, 0\n1200, 2000, [N/A], 42, 9\n1300, 20"
    found = readings(text)
    assert found["clocks.sm"] == {"median": 1100, "min": 1000, "max": 1200}
    assert "power.draw" not in found


def test_without_git_the_commit_is_that_of_the_environment_or_unknown(monkeypatch):
    monkeypatch.delenv("SLOBENCH_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert commit() == "unknown"
    monkeypatch.setenv("SLOBENCH_COMMIT", "abc123")
    assert commit() == "abc123"
