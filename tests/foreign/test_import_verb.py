"""`slobench import` and `slobench judge` as a user meets them."""

import json

import pytest

from loadgen.archive.store import read_run
from loadgen.cli import exit_codes
from loadgen.cli.app import app
from tests.foreign.results import vllm


@pytest.fixture
def slobench(tmp_path, monkeypatch, capsys):
    """(exit code, stdout, stderr) of a command line in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr("sys.argv", ["slobench", *words])
        code = exit_codes.guarded(lambda: app(list(words)), {})
        return (code, *capsys.readouterr())

    return run


def test_a_result_becomes_a_run_directory_that_other_verbs_read(slobench, tmp_path):
    (tmp_path / "out.json").write_text(json.dumps(vllm()))
    words = ("import", "out.json", "--slo", "p50(ttft)<=400ms", "--out", "theirs")
    code, out, err = slobench(*words)
    assert code == 0
    assert out.startswith("MET")
    assert "note       Measured by vllm bench serve" in out
    assert "theirs/report.html" in err
    origin = read_run(tmp_path / "theirs").manifest.imported
    assert origin is not None
    assert (origin.tool, origin.file, origin.duration_s) == ("vllm bench serve", "out.json", 3.7)
    assert slobench("verify", "theirs")[0] == 0
    assert slobench("rescore", "theirs", "--slo", "p50(ttft)<=100ms")[0] == 1
    assert slobench("report", "theirs")[0] == 0
    assert "not known" in (tmp_path / "theirs" / "report.html").read_text()
    assert slobench(*words)[0] == 2  # it exists
    assert slobench(*words, "--force")[0] == 0


def test_a_result_that_is_too_short_leads_to_a_longer_run_of_its_tool(slobench, tmp_path):
    (tmp_path / "out.json").write_text(json.dumps(vllm()))
    _, out, _ = slobench("import", "out.json", "--slo", "p99(ttft)<=2s", "--out", "theirs")
    lines = out.splitlines()
    assert lines[-1] == "  next       measure at least 100 requests with vllm bench serve"
    assert not any("no measurement of the client" in line for line in lines)
    _, out, _ = slobench("report", "theirs", "--full")
    assert "Also: no measurement of the client" in " ".join(out.split())


def test_a_directory_gives_a_run_for_each_result_and_names_the_files_it_skips(slobench, tmp_path):
    (tmp_path / "all" / "deep").mkdir(parents=True)
    (tmp_path / "all" / "notes.json").write_text("{}")
    (tmp_path / "all" / "a.json").write_text(json.dumps(vllm()))
    (tmp_path / "all" / "deep" / "b.json").write_text(json.dumps(vllm()) + json.dumps(vllm()))
    code, out, err = slobench("import", "all", "--out", "runs", "--json")
    assert code == 0
    assert [summary["run"] for summary in json.loads(out)] == ["a", "b-0", "b-1"]
    assert "skipped: all/notes.json (of no known tool)" in err
    assert sorted(path.name for path in (tmp_path / "runs").iterdir() if not path.is_symlink()) == [
        "a", "b-0", "b-1",
    ]  # fmt: skip
    (tmp_path / "all" / "deep" / "a.json").write_text(json.dumps(vllm()))
    code, _, err = slobench("import", "all", "--out", "more")
    assert code == 2
    assert "several results are called a" in err


def test_two_imported_results_of_one_load_compare(slobench, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(vllm()))
    (tmp_path / "c.json").write_text(json.dumps(vllm(request_rate=2.0)))
    assert slobench("import", "a.json", "b.json", "c.json", "--out", "runs")[0] == 0
    assert slobench("compare", "runs/a", "runs/b", "--within-run")[0] == 0
    code, _, err = slobench("compare", "runs/a", "runs/c")
    assert code == 2
    assert "scenario.arrivals.rate: A has 1/s, B has 2/s" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"ttfts": [0.1,', "bad.json:1: damaged JSON at character 16: the file ends"),
        (b"\xff\xfe", "bad.json: not UTF-8 text at byte 0"),
        (b"", "bad.json: not a result of vllm bench serve"),
        (b'{"benchmark": 1}', "bad.json: not a result of vllm bench serve"),
    ],
)
def test_a_file_that_is_no_result_is_refused(slobench, tmp_path, content, message):
    (tmp_path / "bad.json").write_bytes(content)
    code, _, err = slobench("import", "bad.json")
    assert code == 2
    assert message in err
    assert not (tmp_path / "runs").exists()


def test_a_path_without_results_is_refused(slobench, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "empty: no result of vllm bench serve" in slobench("import", "empty")[2]
    assert "nowhere.json: cannot be read: No such file" in slobench("import", "nowhere.json")[2]


def test_judge_prints_a_verdict_for_each_result_and_writes_nothing(slobench, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(vllm()))
    (tmp_path / "b.json").write_text(json.dumps(vllm(ttfts=[0.8, 0.9, 0.8, 0.9], latencies=None)))
    before = sorted(tmp_path.rglob("*"))
    code, out, err = slobench("judge", "a.json", "b.json", "--slo", "p50(ttft)<=400ms")
    assert (code, err) == (1, "")
    first, second, note = out.splitlines()
    assert first.startswith(
        "a: MET in this run: p50(ttft)<=400ms at 200 ms; n = 4 cannot show a 10"
    )
    assert second.startswith("b: MISSED")
    assert note.startswith("note: Measured by vllm bench serve")  # once for both
    assert sorted(tmp_path.rglob("*")) == before
    assert slobench("judge", "a.json", "--slo", "p50(ttft)<=400ms")[0] == 0
    assert slobench("judge", "a.json", "--slo", "p99(ttft)<=400ms")[0] == 3


def test_judge_prints_json_and_takes_another_change(slobench, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(vllm()))
    code, out, _ = slobench("judge", "a.json", "--change", "50%", "--json")
    assert code == 0
    (found,) = json.loads(out)
    assert (found["name"], found["verdict"]) == ("a", "no_verdict")
    assert found["change"] == {"metric": "ttft_s", "change": 0.5, "n": 4, "n_needed": 88}
    assert slobench("judge", "a.json", "--change", "often")[0] == 2
