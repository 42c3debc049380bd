"""A distinctive secret in every place where a user can put one, and a server that repeats what it
receives: no byte of the run directory, of an export or of the terminal holds it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loadgen.run.known_preflights import KnownPreflight, KnownPreflights
from loadgen.workload.prompts import PromptFit
from targets.endpoint import load_target
from tests.e2e.test_distributed import descendants

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(180)]
KEY, HEADER, BODY, USER, PASSWORD, PROXY = (
    f"Zq7{word}9xW4vSecret" for word in ("key", "header", "body", "user", "password", "proxy")
)
SECRETS = (KEY, HEADER, BODY, USER, PASSWORD, PROXY)


class Echo(BaseHTTPRequestHandler):
    """Repeats the key as the model's name and every secret in headers, errors and comments."""

    protocol_version = "HTTP/1.1"
    n_calls = 0

    def log_message(self, *_):
        pass

    def answer(self, status, body, kind="application/json"):
        said = f"{self.headers.get('authorization')} {self.headers.get('x-own')}"
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("x-echo", said)
        self.send_header("server", said)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/v1/models":
            key = self.headers["authorization"].removeprefix("Bearer ")
            models = {"data": [{"id": key, "max_model_len": 4096}]}
            self.answer(200, json.dumps(models).encode())
        else:
            self.answer(404, b"{}")

    def handle(self):
        with suppress(ConnectionError):
            super().handle()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = f"{self.headers['authorization']} {self.headers['x-own']} {json.dumps(body)}"
        Echo.n_calls += 1
        if Echo.n_calls % 4 == 0 and Echo.n_calls > 40:
            error = {"error": {"message": f"wrong: {said[:120]}"}}
            self.answer(400 + Echo.n_calls % 3, json.dumps(error).encode())
            return
        events: list[dict[str, object]]
        if Echo.n_calls % 4 == 1 and Echo.n_calls > 40:
            events = [{"error": {"message": said}}]
        else:
            chunk: dict[str, object] = {"choices": [{"index": 0, "delta": {"content": f"{BODY} "}}]}
            last: dict[str, object] = {
                "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]
            }
            usage: dict[str, object] = {
                "choices": [],
                "usage": {"prompt_tokens": 16, "completion_tokens": 3},
            }
            sent: tuple[dict[str, object], ...] = (chunk, chunk, chunk, last, usage)
            events = [{**e, "model": said} for e in sent]
        lines = [f": {said}\n\n", *(f"data: {json.dumps(e)}\n\n" for e in events)]
        self.answer(200, "".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")


@pytest.fixture
def echo():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    Echo.n_calls, server.daemon_threads = 0, True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_no_byte_that_is_written_holds_a_secret(cli, tmp_path, echo):
    (tmp_path / "target.yaml").write_text(
        f"url: http://127.0.0.1:{echo}\napi_key_env: OUR_KEY\nheaders: {{x-own: {HEADER}}}\n"
        f"extra_body: {{guard: {{api_key: {BODY}}}, ignore_eos: true}}\n"
    )
    environ = {
        "OUR_KEY": KEY,
        "OPENAI_API_KEY": KEY,
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{PASSWORD}",
        "HTTPS_PROXY": f"http://{USER}:{PROXY}@127.0.0.1:9",
    }
    run = cli(
        "run", "quickstart", "--target=target.yaml", "--rate=20/s", "--duration=3s", "--warmup=0s",
        f"--otlp=http://{USER}:{PASSWORD}@127.0.0.1:9", "--out=run", *cli.lenient,
        cwd=tmp_path, environ=environ,
    )  # fmt: skip
    assert (tmp_path / "run" / "report.html").exists(), run.stderr
    printed = [run.stdout, run.stderr]
    for form in ("csv", "json", "jsonl", "parquet", "vllm-bench"):
        done = cli("export", "run", f"--format={form}", f"--output=exported.{form}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        printed += [done.stdout, done.stderr]
    again = cli("report", "run", cwd=tmp_path, environ=environ)
    printed += [again.stdout, again.stderr]
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["target"]["model"] == "[redacted]"
    assert manifest["target"]["extra_body"] == {
        "guard": {"api_key": "[redacted]"},
        "ignore_eos": True,
    }
    (tmp_path / "target.yaml").unlink()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 8
    for secret in SECRETS:
        assert not [p for p in files if secret.encode() in unpacked(p)], secret
        assert not [text for text in printed if secret in text], secret


def test_no_process_no_cache_and_no_live_metric_shows_a_secret(cli, tmp_path, echo):
    """The command lines of all processes, the cache, Prometheus and OTLP of a run."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra `otel`")
    from tests.live.test_otlp import Collector

    (tmp_path / "target.yaml").write_text(
        f"url: http://127.0.0.1:{echo}\napi_key_env: OUR_KEY\nheaders: {{x-own: {HEADER}}}\n"
        f"extra_body: {{guard: {{api_key: {BODY}}}, ignore_eos: true}}\n"
    )
    cache = tmp_path / "cache"
    environ = cli.environ | {"OUR_KEY": KEY, "XDG_CACHE_HOME": str(cache)}
    shown: list[str] = []
    with Collector() as collector:
        command = [
            sys.executable, "-m", "loadgen", "run", "quickstart", "--target=target.yaml",
            "--rate=20/s", "--duration=6s", "--warmup=0s", "--workers=2", "--metrics-port=0",
            f"--otlp={collector.url}", "--out=run", *cli.lenient,
        ]  # fmt: skip
        with subprocess.Popen(
            command, cwd=tmp_path, env=environ, text=True, stderr=subprocess.PIPE
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                shown += [line, *descendants(process.pid).values()]
                if "metrics: " in line:
                    url = line.split("metrics: ")[1].split()[0]
                if "5/6 s" in line:
                    with urllib.request.urlopen(url) as page:
                        shown.append(page.read().decode())
        shown += [str(request) for _, request in collector.received]
    assert sum("slobench_requests_total" in text for text in shown) == 1
    assert sum("slobench.requests" in text for text in shown) >= 1
    (tmp_path / "target.yaml").unlink()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for secret in SECRETS:
        assert not [text for text in shown if secret in text], secret
        assert not [path for path in files if secret.encode() in unpacked(path)], secret


def test_the_cache_of_preflights_holds_no_secret_and_is_its_users_only(tmp_path):
    path = tmp_path / "target.yaml"
    path.write_text("url: http://127.0.0.1:9\napi_key_env: OUR_KEY\n")
    endpoint = load_target(str(path), {"OUR_KEY": KEY})
    store = KnownPreflights(tmp_path / "cache" / "preflights")

    def keep(model):
        known = KnownPreflight(1.0, {model: None}, {"model": model}, PromptFit(), (), ())
        store.keep(endpoint, [model], known)
        return store.find(endpoint, [model])

    assert keep("a-model").models == {"a-model": None}
    assert keep(KEY) is None
    assert keep(f"a-{KEY}-b") is None
    (file,) = (tmp_path / "cache" / "preflights").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_crash_file_holds_no_secret(cli, tmp_path):
    """A plug-in that fails with the command line and the environment in its message."""
    (tmp_path / "broken.py").write_text(
        "import os, sys\nraise LookupError(f'{sys.argv} {os.environ}')\n"
    )
    environ = {"OPENAI_API_KEY": KEY, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = (
        "run", "quickstart", "--target=mock", "--plugin=broken.py",
        f"--otlp=http://{USER}:{PASSWORD}@127.0.0.1:9", f"--engine=api_key={BODY}",
    )  # fmt: skip
    done = cli.fresh(*words, cwd=tmp_path, environ=environ, timeout_s=60)
    files = list((tmp_path / "cache").rglob("error-*.txt"))
    for text in (done.stdout, done.stderr, *(file.read_text() for file in files)):
        assert not [secret for secret in SECRETS if secret in text], text


def unpacked(path):
    """The bytes of a file; of a Parquet file, its values and its metadata as text."""
    if path.suffix != ".parquet":
        return path.read_bytes()
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    return f"{table.to_pydict()} {table.schema.metadata}".encode() + path.read_bytes()
