"""`slobench report` on a recorded run: it does not replace a verdict by another by mistake."""

import json

import pytest

from tests.runs import measured_run, two_classes, with_manifest, write_to
from tests.test_verbs import slobench as command_line

MADE_UNDER = "p90(ttft) <= 300ms"
OTHER = "p90(ttft) <= 50ms"


@pytest.fixture
def cli(capsys, monkeypatch):
    return lambda *words: command_line(capsys, monkeypatch, *words)


def recorded(directory, run):
    write_to(directory, run)
    return directory


@pytest.fixture
def directory(tmp_path, cli):
    path = recorded(tmp_path / "run", measured_run(n_requests=60, slo=[MADE_UNDER]))
    assert cli("report", path)[0] == 0
    return path


def results(directory):
    return [(directory / name).read_bytes() for name in ("summary.json", "report.html")]


def test_other_slos_do_not_replace_a_verdict(cli, directory):
    before = results(directory)
    code, out, err = cli("report", directory, "--slo", OTHER)
    assert (code, out) == (2, "")
    assert f"its verdict was reached by '{MADE_UNDER}'" in err
    assert f"--slo would replace it by one for '{OTHER}'" in err
    assert f"slobench rescore {directory} --slo '{OTHER}'" in err
    assert "add --overwrite" in err
    assert results(directory) == before


def test_no_run_is_written_where_one_of_them_is_refused(cli, directory, tmp_path):
    fresh = recorded(tmp_path / "fresh", measured_run(n_requests=60, slo=[MADE_UNDER]))
    assert cli("report", fresh, directory, "--slo", OTHER)[0] == 2
    assert not (fresh / "summary.json").exists()


def test_overwrite_replaces_it_and_the_page_shows_both_sets_of_slos(cli, directory):
    assert cli("report", directory, "--slo", OTHER, "--overwrite")[0] == 0
    summary, page = (text.decode() for text in results(directory))
    content = json.loads(summary)
    assert (content["made_under"], content["judged_by"]) == ([MADE_UNDER], [OTHER])
    assert content["verdict"] == "missed"
    made, other = (text.replace("<", "&lt;") for text in (MADE_UNDER, OTHER))
    assert f"Made under: {made}. Judged here by other SLOs: {other}." in page
    assert cli("report", directory, "--slo", OTHER)[0] == 0  # replaces nothing
    assert cli("report", directory, "--slo", MADE_UNDER)[0] == 2
    assert cli("report", directory)[0] == 0  # back to the SLOs of the run
    assert f"Made under and judged by: {made}." in results(directory)[1].decode()


def test_a_run_without_a_verdict_may_be_judged_by_any_slos(cli, tmp_path):
    fresh = recorded(tmp_path / "fresh", measured_run(n_requests=60, slo=[MADE_UNDER]))
    assert cli("report", fresh, "--slo", OTHER)[0] == 0


def test_an_slo_of_a_class_is_named_with_it(cli, tmp_path):
    classes = two_classes(chat=[MADE_UNDER], slo=["error_rate <= 1%"])
    run = recorded(tmp_path / "two", with_manifest(classes, names={"classes": ("chat", "rag")}))
    assert cli("report", run)[0] == 0
    code, _, err = cli("report", run, "--slo", MADE_UNDER, "--slo", "error_rate <= 1%")
    assert code == 2
    assert f"'error_rate <= 1%', 'chat: {MADE_UNDER}'" in err


def test_a_rescored_run_shows_both_sets_of_slos(cli, directory):
    before = results(directory)
    out = " ".join(cli("rescore", directory, "--slo", OTHER)[1].split())
    assert f"Made under: {MADE_UNDER}. Judged here by other SLOs: {OTHER}." in out
    assert results(directory) == before
