"""The server as a process: READY, exit codes, signals, one-line errors."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from loadgen.errors import UsageError
from reference_engine.serve import n_http_workers
from reference_engine.serving.build import build
from reference_engine.serving.serve_options import ServeOptions, choose
from reference_engine.state.cost_model import StepShape

ENGINE = [sys.executable, "-m", "reference_engine"]


def start(*flags: str) -> tuple[subprocess.Popen[str], int]:
    """A server process that is ready, and its port."""
    process = subprocess.Popen(
        [*ENGINE, "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("READY http://127.0.0.1:"), line + process.communicate()[1]
    return process, int(line.rsplit(":", 1)[1])


def complete(port: int, **body: object) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    text = json.dumps({"prompt": "abc", "max_tokens": 5, **body})
    connection.request("POST", "/v1/completions", text, {"x-request-id": "run-1"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert isinstance(answer, dict)
    return answer


HTTP_WORKERS = pytest.mark.parametrize("workers", ["0", "2"])


@pytest.mark.e2e
@HTTP_WORKERS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_answers_and_leaves_with_zero_on_a_signal(number, workers):
    process, port = start("--device", "toy", "--http-workers", workers)
    assert complete(port)["usage"]["completion_tokens"] == 5
    busy = subprocess.run(
        [*ENGINE, "--device", "toy", "--port", str(port)], capture_output=True, text=True
    )
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "request run-1 ok: 3 prompt tokens" in errors
    assert "Traceback" not in errors
    assert busy.returncode == 2
    assert busy.stdout == ""
    assert busy.stderr.count("\n") == 1
    assert f"port {port}" in busy.stderr


@pytest.mark.e2e
def test_objects_loaded_before_serving_are_not_garbage_collected():
    """A full collection in a serving process would stop every stream for as long as it takes."""
    program = (
        "import gc, sys; from reference_engine.__main__ import main; sys.argv[0] = 'engine'\n"
        "try: main()\n"
        "finally: print('frozen', gc.get_freeze_count())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "--port", "0", "--device", "toy"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("READY")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert int(output.split()[-1]) > 10_000


@pytest.mark.e2e
@HTTP_WORKERS
def test_a_server_ends_with_its_parent(workers):
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process, _ = start(
        "--device", "toy", "--http-workers", workers, "--parent-pid", str(parent.pid)
    )
    parent.kill()
    assert process.wait(timeout=20) == 0
    parent.communicate()
    process.communicate()


def begun(port: int, max_tokens: int = 4000) -> http.client.HTTPResponse:
    """A long answer whose first byte has arrived."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    text = json.dumps({"prompt": "a", "max_tokens": max_tokens, "stream": True})
    connection.request("POST", "/v1/completions", text, {"Connection": "close"})
    response = connection.getresponse()
    assert response.read(1) == b"d"
    return response


@pytest.mark.e2e
@HTTP_WORKERS
def test_a_second_signal_ends_the_draining_with_an_error_in_the_stream(workers):
    process, port = start("--device", "toy", "--set", "step_s=0.02", "--http-workers", workers)
    answer = begun(port)
    process.terminate()
    assert process.stderr is not None
    assert "draining" in process.stderr.readline()
    process.terminate()
    assert b"the server is shutting down" in rest(answer)
    process.communicate(timeout=20)
    assert process.returncode == 0


def children(process: subprocess.Popen[str]) -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_every_process_of_a_server_lets_its_answers_end(number):
    process, port = start("--device", "toy", "--set", "step_s=0.02", "--http-workers", "2")
    answers = [begun(port, max_tokens=60) for _ in range(4)]
    for pid in [*children(process), process.pid]:
        os.kill(pid, number)
    assert [rest(answer).endswith(b"[DONE]\n\n") for answer in answers] == [True] * 4
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("patience_s", "code", "words"),
    [(30, 0, "does not end; killed"), (0.1, 4, "an HTTP worker did not start within 0.1 s")],
)
def test_an_http_worker_that_hangs_before_it_begins_does_not_keep_the_server(
    patience_s, code, words
):
    program = (
        "from reference_engine.serving.http_workers import processes\n"
        f"processes._OPEN_S = {patience_s}\n"
        "import os, signal, sys; from reference_engine import serve; build = serve.build\n"
        "def stopped(options):\n"
        "    worker = open(f'/proc/self/task/{os.getpid()}/children').read().split()[0]\n"
        "    os.kill(int(worker), signal.SIGSTOP)\n"
        "    return build(options)\n"
        "serve.build = stopped; start = serve.Service.start\n"
        "serve.Service.start = lambda self: (start(self), print('opening', flush=True))[0]\n"
        "sys.exit(serve.run(serve.ServeOptions(port=0, device='toy', http_workers=1)))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "opening\n"
        if code == 0:
            process.terminate()
        _, errors = process.communicate(timeout=20)
    finally:
        for pid in children(process) if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.kill()
    assert process.returncode == code
    assert words in errors


@pytest.mark.e2e
def test_answers_of_several_http_workers_have_ids_of_their_own():
    process, port = start("--device", "toy", "--http-workers", "2")
    ids = [complete(port)["id"] for _ in range(20)]
    process.terminate()
    process.communicate(timeout=20)
    assert len(set(ids)) == 20
    assert {name.split("-")[1] for name in ids} <= {"1", "2"}


@pytest.mark.e2e
def test_http_workers_accept_a_long_tmpdir_and_import_nothing_from_the_cwd(tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    (tmp_path / "tempfile.py").write_text("raise SystemExit('shadowed')")
    program = "import sys; from reference_engine.__main__ import main; sys.exit(main())"
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-c",
            program,
            "--port",
            "0",
            "--device",
            "toy",
            "--http-workers",
            "1",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(long)},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    process.terminate()
    _, errors = process.communicate(timeout=20)
    assert line.startswith("READY"), errors
    assert process.returncode == 0


@pytest.mark.e2e
def test_a_dead_http_worker_ends_the_server_with_a_message():
    process, port = start("--device", "toy", "--set", "step_s=0.02", "--http-workers", "2")
    answers = [begun(port) for _ in range(6)]
    first, second = children(process)
    os.kill(first, signal.SIGKILL)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 4
    assert f"HTTP worker {first} ended (signal 9)" in errors.splitlines()[-1]
    assert not Path(f"/proc/{second}").exists()
    for answer in answers:  # ended by the other HTTP worker, or cut off with this worker
        assert not rest(answer).endswith(b"[DONE]\n\n")


def rest(answer: http.client.HTTPResponse) -> bytes:
    """The rest of a body, complete or cut off."""
    with answer:
        try:
            return answer.read()
        except http.client.IncompleteRead as error:
            return error.partial
        except ConnectionResetError:
            return b""


@pytest.mark.e2e
def test_a_dead_engine_ends_every_stream_with_an_error_and_its_http_workers_end(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        process, port = start("--device", "toy", "--set", "step_s=0.02", "--http-workers", "2")
        assert len(list(Path(directory).glob("*/engine.sock"))) == 1
        answer = begun(port)
        process.kill()
        assert b"the engine's process has ended" in rest(answer)
        _, errors = process.communicate(timeout=20)  # after the workers have closed it, too
        assert errors.count("the engine's process is gone") == 2
        assert list(Path(directory).iterdir()) == []


@pytest.mark.e2e
def test_a_signal_while_the_model_is_loading_ends_the_http_workers_too():
    program = (
        "import sys, time; from reference_engine import serve\n"
        "serve.build = lambda options: (print('loading', flush=True), time.sleep(60))\n"
        "sys.exit(serve.run(serve.ServeOptions(port=0, http_workers=1)))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.terminate()
    _, errors = process.communicate(timeout=20)  # the pipe of errors is the HTTP worker's, too
    assert (process.returncode, errors) == (0, "")


def test_the_default_number_of_http_workers_is_0_except_on_a_gpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    n_workers = {
        (device, workers): n_http_workers(ServeOptions(device=device, http_workers=workers))
        for device in ("cpu", "toy", "sim", "cuda")
        for workers in (None, 1)
    }
    assert {key for key, n in n_workers.items() if n == 0} == {
        ("cpu", None),
        ("toy", None),
        ("sim", None),
    }
    assert (n_workers["cuda", None], n_workers["cuda", 1], n_workers["toy", 1]) == (4, 1, 1)


@pytest.mark.e2e
def test_the_torch_engine_answers_like_any_server():
    pytest.importorskip("torch", reason="torch is not installed")
    process, port = start("--shape", "nano")
    answers = [complete(port, temperature=0)["choices"] for _ in range(2)]
    process.terminate()
    process.communicate(timeout=20)
    assert answers[0] == answers[1]
    assert process.returncode == 0


@pytest.mark.e2e
def test_without_torch_a_line_names_the_package_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from reference_engine.__main__ import main; sys.exit(main(['--port', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'slobench[engine]'" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mode", "chunkd"], "unknown batching mode 'chunkd'; did you mean 'chunked'"),
        (["--device", "cpuu"], "unknown device 'cpuu'; did you mean 'cpu'"),
        (["--shape", "tinny"], "did you mean 'tiny'"),
        (["--token-budget", "0"], "options: token_budget"),
        (["--mode", "static", "--token-budget", "64"], "token_budget: the mode 'static' has none"),
        (["--port", "many"], "options: port"),
        (["--set", "watermark=2"], "mode 'chunked': watermark: "),
        (["--set", "waterline=2"], "unknown engine option 'waterline'; did you mean 'watermark'"),
        (["--set", "tokenbudget=2"], "did you mean 'token_budget'"),
        (["--set", "watermark"], "--set: expected key=value, got 'watermark'"),
        (["--set", "watermark=[1"], "--set watermark: [1 is not JSON"),
        (["--set", "step_s=-1"], "device 'toy': step_s"),
        (["--set", "parent_pid=1"], "unknown engine option 'parent_pid'"),
        (["--api-key-env", "SLOBENCH_NOT_SET"], "SLOBENCH_NOT_SET is not set"),
        (["--max-model-len", "9999"], "max_model_len: 9999 is above the 4096 positions"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(flags, words, capsys):
    from reference_engine.__main__ import main

    before = signal.getsignal(signal.SIGTERM)
    code = main(["--device", "toy", "--port", "0", *flags])
    signal.signal(signal.SIGTERM, before)
    out, errors = capsys.readouterr()
    assert (code, out) == (2, "")
    assert errors.count("\n") == 1
    assert words in errors


@pytest.mark.parametrize(
    ("mode", "budget", "expected"),
    [("chunked", None, 2048), ("split_fuse", None, 512), ("chunked", "slo", "slo")],
)
def test_a_mode_has_its_own_token_budget_unless_the_option_is_set(mode, budget, expected):
    engine = build(ServeOptions(device="toy", shape="nano", mode=mode, token_budget=budget))
    assert engine.state.policy.model_dump()["token_budget"] == expected
    assert engine.limits.max_step_tokens >= 4096  # a whole prompt


def test_options_reach_the_policy_and_the_limits():
    engine = build(
        ServeOptions(
            device="toy",
            shape="nano",
            token_budget=64,
            max_num_seqs=5,
            kv_blocks=100,
            max_model_len=256,
            policy_args={"watermark": "0.05"},
        )
    )
    assert engine.state.policy.model_dump() == {
        "token_budget": 64,
        "max_num_seqs": 5,
        "watermark": 0.05,
        "long_prefill_tokens": 0,
        "reserve": "watermark",
        "tpot_slo": None,
    }
    assert (engine.limits.max_num_seqs, engine.limits.max_model_len) == (5, 256)
    assert engine.state.kv.n_blocks == 100


def test_knobs_reach_the_mode_or_the_executor_by_name():
    flags = {"device": "toy", "shape": "nano"}
    options = choose(flags, ["watermark=0.05", "step-s=0.25", "kv_blocks=100", "seed=3"])
    assert (options.policy_args, options.executor_args) == (
        {"watermark": "0.05"},
        {"step_s": "0.25"},
    )
    assert (options.kv_blocks, options.seed) == (100, 3)
    assert build(options).state.policy.model_dump()["watermark"] == 0.05
    assert choose(flags, ["mode=vllm_v1", "long_prefill_tokens=9"]).mode == "vllm_v1"


def test_the_old_setting_fronts_means_http_workers():
    """Kept for one release, as a pair and as a flag."""
    assert choose({"device": "toy"}, ["fronts=3"]).http_workers == 3
    assert choose({"device": "toy", "fronts": "2"}).http_workers == 2
    with pytest.raises(UsageError, match=r"options: http_workers: .*less than or equal to 64"):
        choose({}, ["fronts=65"])


@pytest.mark.e2e
def test_the_old_flag_fronts_starts_http_workers():
    process, port = start("--device", "toy", "--fronts", "1")
    n_workers = len(children(process))
    completion_id = complete(port)["id"]
    process.terminate()
    process.communicate(timeout=20)
    assert n_workers == 1
    assert completion_id == "cmpl-1-1"


def test_the_old_flag_fronts_is_not_in_the_help():
    from reference_engine.__main__ import _parser

    help_text = _parser().format_help()
    assert "--http-workers" in help_text
    assert "fronts" not in help_text


def test_a_simulated_device_has_the_memory_and_the_prices_of_its_hardware():
    engine = build(ServeOptions(device="sim", shape="8b", executor_args={"hardware": "h200"}))
    assert engine.limits.max_model_len == 32_768
    # 90 % of 141 GB less 16.1 GB of weights, at 131 072 bytes per token in bfloat16.
    assert 40_000 < engine.state.kv.n_blocks < 60_000
    shape = StepShape(n_seqs=1, n_decode=1, context_tokens=100)
    # One step reads 16 GB at 4.3 TB/s and little else.
    assert 3e-3 < engine.state.view().cost.estimate(shape) < 8e-3


def test_host_memory_and_planning_ahead_reach_the_engine():
    flags = {"device": "toy", "shape": "nano"}
    state = build(choose(flags, ["swap_blocks=9", "preempt=swap", "async_depth=1"])).state
    assert (state.host.n_blocks, state.preempt, state.async_depth) == (9, "swap", 1)
    assert not state.is_strict


def test_limits_that_are_not_set_are_the_modes():
    engine = build(ServeOptions(device="toy", shape="nano"))
    assert engine.state.policy.model_dump()["token_budget"] == 2048
    assert engine.limits.max_num_seqs == 256


def test_a_simulated_device_brings_its_own_memory_context_and_prices():
    engine = build(choose({"device": "sim", "shape": "8b"}, ["hardware=2xh100"]))
    assert engine.limits.max_model_len == 32_768
    # 0.9 · 160 GB − 16.06 GB of weights, at 131 072 bytes of KV per token and 16 tokens per block
    assert engine.state.kv.n_blocks == pytest.approx(127.9e9 / 131_072 / 16, rel=1e-3)
    # a decode reads 15 GB of weights at 2 · 0.88 · 3.35 TB/s, and there is some overhead
    alone_s = engine.state.view().cost.estimate(StepShape(1, n_decode=1))
    assert 2.5e-3 < alone_s < 6e-3
    with pytest.raises(UsageError, match="did you mean 'h200'"):
        build(choose({"device": "sim"}, ["hardware=h20"]))


def test_kv_in_8_bits_is_a_knob_of_the_simulated_device_and_of_a_gpus_code():
    pytest.importorskip("torch", reason="torch is not installed")
    simulated = build(choose({"device": "sim", "shape": "8b"}, ["kv_dtype=fp8"]))
    # 0.9 · 141 GB − 16.06 GB of weights, at 67 584 bytes: 2 · 32 layers · 8 heads · (128 + 4)
    assert simulated.state.kv.n_blocks == pytest.approx(110.8e9 / 67_584 / 16, rel=1e-3)
    knobs = ["kv_dtype=int8", "on=cpu", "kernels=plain", "dtype=float32", "max_num_seqs=1"]
    computed = build(choose({"device": "cuda", "shape": "tiny"}, knobs))
    assert computed.state.kv.n_blocks == 29_127  # 256 MiB at 9 216 bytes
    with pytest.raises(UsageError, match=r"kv_dtype.*'fp8' or 'int8'"):
        build(choose({"device": "cuda"}, ["kv_dtype=fp4"]))


def test_default_kv_is_a_gibibyte_at_most_and_a_full_context_at_least():
    blocks = {
        shape: build(ServeOptions(device="toy", shape=shape)).state.kv.n_blocks
        for shape in ("tiny", "110m", "8b")
    }
    # Bytes of K and V per token (float32): 2·4·2·32·4 = 2 048, 24 576 and 262 144.
    assert blocks == {"tiny": 4096, "110m": 2730, "8b": 256}


@pytest.mark.e2e
def test_the_api_key_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("ENGINE_TEST_KEY", "secret")
    process, port = start("--device", "toy", "--api-key-env", "ENGINE_TEST_KEY")
    answer = complete(port)
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert answer["error"]["code"] == "invalid_api_key"
    assert "secret" not in errors


def test_an_unknown_shape_is_a_usage_error():
    with pytest.raises(UsageError, match="Models are never downloaded"):
        build(ServeOptions(device="toy", shape="llama"))
