"""A run that reads a server's metrics beside itself."""

import http.server
import json
import threading

import pytest

from loadgen.archive.store import read_run
from targets.embed import mock

pytestmark = pytest.mark.e2e


class Exporter(http.server.BaseHTTPRequestHandler):
    """A queue that grows by one with every reading; the third reading fails."""

    n_asked = 0

    def do_GET(self):
        Exporter.n_asked += 1
        n = Exporter.n_asked
        text = (
            f'vllm:num_requests_waiting{{engine="0"}} {n}\nvllm:kv_cache_usage_perc 0.5\n'
            f"vllm:generation_tokens_total {1000 * n}\n"
        ).encode()
        self.send_response(500 if n == 4 else 200)  # the first was the preflight's
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


@pytest.fixture
def metrics_url():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Exporter) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()
        thread.join()


def test_the_servers_account_is_in_the_run_its_summary_and_its_page(cli, tmp_path, metrics_url):
    flags = ["--rate=10/s", "--input-len=64", "--output-len=8", "--duration=4s", *cli.lenient]
    with mock({"ttft": "2ms", "itl": "1ms"}, tmp_path) as served:
        target = f"url: {served.endpoint.url}\nmetrics_url: {metrics_url}\n"
        (tmp_path / "t.yaml").write_text(target)
        result = cli("run", *flags, "--target=t.yaml", "--slo=ttft<=30s", "--out=run", "--full",
                     cwd=tmp_path)  # fmt: skip
        without = cli("run", *flags, "--target=t.yaml", "--no-scrape", "--out=no", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "ok   server_metrics" in result.stderr
    run = read_run(tmp_path / "run")
    waiting = run.server[run.server.series == "waiting"]
    assert waiting.t_s.iloc[0] < 2.0, "read at the start"
    assert waiting.value.is_monotonic_increasing
    assert run.manifest["scrapes"]["n_failed"] == 1
    assert len(waiting) == run.manifest["scrapes"]["n"] - 1 >= 4
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["server"]["kv_usage_max"] == 0.5
    assert summary["server"]["waiting_max"] >= 4
    assert any("1 of" in f and "answered 500" in f for f in summary["findings"])
    assert any("other clients used it" in f for f in summary["findings"])
    assert "server: up to" in result.stdout
    assert "in the server: running" in (tmp_path / "run" / "report.html").read_text()
    assert "server_metrics" not in without.stderr
    assert not (tmp_path / "no" / "server.parquet").exists()
    assert json.loads((tmp_path / "no" / "summary.json").read_text())["server"] is None
