"""A distinctive secret in every place where a user can put one, and a server that repeats what it
receives: no byte of the run directory, of an export or of the terminal holds it."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

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
