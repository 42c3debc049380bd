"""Token counts that a server states wrongly, or for whole answers only, and the metrics that depend
on them, against the script of the mock."""

import json

import pytest

from loadgen.archive.store import read_run
from loadgen.records import TokenSource

pytestmark = pytest.mark.e2e
FLAGS = ["--rate=20/s", "--input-len=16", "--output-len=24", "--duration=2s", "--out=run", "--full"]


def measured(cli, folder, engine, *more, code=0):
    """The run and its summary, against a mock of 12 ms per token."""
    engine = f"--engine=ttft=20ms,itl=12ms,{engine}"
    result = cli("run", "--target=mock", engine, *FLAGS, *more, *cli.lenient, cwd=folder)
    assert result.returncode == code, result.stderr
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return read_run(folder / "run"), summary, result.stdout


def test_usage_of_zero_tokens_keeps_no_tpot_slo(cli, tmp_path):
    run, summary, terminal = measured(cli, tmp_path, "usage=zero", "--slo=tpot<=5ms", code=1)
    assert summary["verdict"] == "missed"
    assert set(run.request_rows["token_source"]) == {TokenSource.distrusted}
    assert set(run.request_rows["output_tokens"]) == {24}
    assert 0.0117 < summary["metrics"]["tpot_s"]["mean"] < 0.024
    page = (tmp_path / "run" / "report.html").read_text()
    for text in (terminal, page):
        assert "TPOT †" in text
        assert "usage cannot be true" in " ".join(text.replace("&#39;", "'").split())
    assert "cannot be true" in summary["marks"]["tpot_s"]


@pytest.mark.parametrize("coalesce", [1, 4])
def test_tpot_is_that_of_the_script_where_usage_gives_only_the_total(cli, tmp_path, coalesce):
    engine = f"coalesce={coalesce},reject=continuous_usage_stats"
    run, summary, terminal = measured(cli, tmp_path, engine)
    assert set(run.request_rows["token_source"]) == {TokenSource.usage}
    assert not run.chunk_rows["tokens"].any() or coalesce == 1
    # With n - 1 in place of n - 4, it would be 10.4 ms. A busy machine only adds to it.
    assert 0.0117 < summary["metrics"]["tpot_s"]["mean"] < 0.024
    assert ("TPOT †" in terminal) == (coalesce == 4)


def test_without_any_count_tpot_is_marked(cli, tmp_path):
    _, summary, terminal = measured(cli, tmp_path, "usage=off,coalesce=4")
    assert 0.0456 < summary["metrics"]["tpot_s"]["mean"] < 0.096
    assert "TPOT †" in terminal
    assert "answers have no usage" in summary["marks"]["tpot_s"]
