"""Whole runs of embeddings and rerankings against the scripted mock server, whose log is the
oracle."""

import json
import re

import numpy as np
import pytest

from loadgen.archive.store import read_run
from loadgen.records import Status
from targets.embed import mock

pytestmark = pytest.mark.e2e
PLUGIN = """
from targets.base import TARGETS
from targets.openai_embeddings import OpenAIEmbeddings
from targets.rerank import Rerank

TARGETS.register(OpenAIEmbeddings)
TARGETS.register(Rerank)
"""
LOAD = (
    *("--rate=20/s", "--input-len=96", "--output-len=1", "--duration=2s"),
    *("--slo=e2e <= 20s", "--slo=attainment >= 50%"),
)


def run_against(cli, folder, path, engine, *words):
    """The finished process, the run and the rows of the mock's log."""
    (folder / "codecs.py").write_text(PLUGIN)
    with mock({"ttft": "20ms", **engine}, folder) as served:
        (folder / "target.yaml").write_text(
            f"url: {served.endpoint.url}{path}\ntexts_per_request: 4\n"
        )
        done = cli(
            *("run", *LOAD, "--target=target.yaml", "--plugin=codecs.py", *cli.lenient),
            *("--out=run", "--full", *words), cwd=folder,
        )  # fmt: skip
    return done, folder / "run"


@pytest.mark.parametrize(
    ("path", "noun"), [("/v1/embeddings", "vectors"), ("/v1/rerank", "scores")]
)
def test_a_run_without_tokens_is_judged_by_its_latency(cli, tmp_path, path, noun):
    done, directory = run_against(cli, tmp_path, path, {})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_run(directory).request_rows
    assert (rows["status"] == Status.ok).all()
    assert (rows["results"] == 4).all()
    assert not rows["output_tokens"].any()
    assert np.isnan(rows["first_token_s"]).all()
    assert (rows["last_token_s"] - rows["sent_s"] >= 0.02).all()
    assert rows["input_tokens"].mean() == pytest.approx(96, abs=4)
    summary = json.loads((directory / "summary.json").read_text())
    n = summary["counts"]["due"]
    assert summary["results"] == noun
    assert summary["throughput"]["results_per_s"] == pytest.approx(4 * n / 2, rel=0.15)
    assert summary["throughput"]["output_tokens_per_s"] == 0
    page = (directory / "report.html").read_text()
    shown = re.sub(r"<(script|style)[^>]*>.*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL)
    for text in (done.stdout, " ".join(shown.split())):
        assert f"{noun}/s" in text
        assert re.findall(".{60}(?:TTFT|TPOT|output tokens)", text) == []


def test_a_failing_server_of_embeddings_is_missed(cli, tmp_path):
    done, _ = run_against(
        cli, tmp_path, "/v1/embeddings", {"fail": "500:80%"}, "--set=stop_when=never"
    )
    assert done.returncode in (1, 3), done.stdout + done.stderr
    assert "MET" not in done.stdout.replace("NOT MET", "")
