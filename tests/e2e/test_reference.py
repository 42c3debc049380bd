"""The bundled engine as a target: started, measured over real sockets, and reaped."""

import importlib.util
import json
import socket
from pathlib import Path

import pandas as pd
import pytest

from loadgen.archive.store import read_run
from loadgen.records import Status, TokenSource

pytestmark = pytest.mark.e2e
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed (extra: engine)"
)
FLAGS = ["--rate=10/s", "--input-len=90", "--output-len=12", "--duration=2s", "--slo=ttft<=30s"]


def engine_is_gone(directory):
    """Nothing listens any more where the run's engine did."""
    url = json.loads((directory / "manifest.json").read_text())["target"]["url"]
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


def check_engine_logs(directory, rows):
    """Every request arrives and finishes in the engine's log, inside the client's interval."""
    events = pd.read_parquet(directory / "engine_events.parquet").dropna(subset="row")
    for kind, before, after in (
        ("arrival", "sent_s", "first_token_s"),
        ("finish", "sent_s", "done_s"),
    ):
        at_s = events[events.kind == kind].set_index("row").t_s.sort_index().to_numpy()
        assert len(at_s) == len(rows)
        assert (rows[before] <= at_s).all()
        assert (at_s <= rows[after]).all()
    steps = pd.read_parquet(directory / "engine_steps.parquet")
    assert steps.n_decode.sum() >= 11 * len(rows)
    assert steps.t_s.is_monotonic_increasing


@pytest.mark.parametrize("device", ["sim", "toy", pytest.param("cpu", marks=needs_torch)])
def test_lengths_are_exact_and_the_engine_is_reaped(cli, tmp_path, device):
    result = cli(
        "run", "--target=reference", f"--engine=device={device},shape=nano", *FLAGS, *cli.lenient,
        "--out=run", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    rows = read_run(tmp_path / "run").request_rows
    assert (rows["status"] == Status.ok).all()
    assert (rows["input_tokens"] == 90).all()
    assert (rows["output_tokens"] == 12).all()
    assert (rows["chunks"] == 12).all()
    assert (rows["token_source"] == TokenSource.usage).all()
    assert (rows["cached_tokens"] == 0).all()
    assert (rows["server_ttft_s"] > 0).all()
    assert (rows["server_ttft_s"] < rows["first_token_s"] - rows["sent_s"]).all()
    assert engine_is_gone(tmp_path / "run")
    check_engine_logs(tmp_path / "run", rows)
    assert "READY" in (tmp_path / "run" / "logs" / "engine.log").read_text()


def test_a_shared_prefix_is_found_in_the_engines_cache(cli, tmp_path):
    result = cli(
        "run", "--target=reference", "--engine=device=toy,shape=nano", *FLAGS, *cli.lenient,
        "--set=requests.shared_prefix.tokens=64", "--out=run", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    rows = read_run(tmp_path / "run").request_rows
    assert (rows["input_tokens"] == 154).all()
    assert (rows["cached_tokens"][1:] >= 64).mean() > 0.8


def test_without_torch_the_message_says_what_to_install(cli, tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch here', name='torch')")
    result = cli(
        "run", "--target=reference", *FLAGS, cwd=tmp_path, environ={"PYTHONPATH": str(tmp_path)}
    )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "pip install 'slobench[engine]'" in line


def test_a_busy_port_is_named(cli, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = cli("serve", "--device=toy", f"--port={port}", cwd=tmp_path)
    assert result.returncode == 2
    assert str(port) in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_python_callers_get_the_run(tmp_path, page_cache, monkeypatch):
    import slobench as sb

    monkeypatch.chdir(tmp_path)
    scenario = sb.load_scenario(
        "quickstart", ["phases={warmup: 0s, measure: 1s}", "arrivals.rate=20/s"]
    )
    run = sb.run(
        scenario, "reference", tmp_path / "run", engine="device=toy,shape=nano",
        cache_dir=page_cache,
    )  # fmt: skip
    assert len(run.requests) == len(sb.make_schedule(scenario))
    assert run.requests.status.eq("ok").all()
    assert sb.summarize(run).to_json()["counts"]["ok"] == len(run.requests)
    assert Path(tmp_path / "run" / "report.html").stat().st_size > 500_000
