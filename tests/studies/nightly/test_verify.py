"""`slobench verify` on runs, nights and baselines."""

import json
import shutil

import pytest

from loadgen.archive.verify import exit_code
from loadgen.archive.verify import verify as verify_with
from loadgen.cli.study_files import check_store
from loadgen.errors import UsageError
from loadgen.studies.nightly.run import nightly
from tests.runs import measured_run, write_to
from tests.studies.nightly import few
from tests.test_verbs import slobench as command_line


def verify(path):
    return verify_with(path, check_store)


@pytest.fixture(scope="module")
def night(cache, tmp_path_factory):
    """A folder with a night (`night`) and its baseline (`baseline`)."""
    folder = tmp_path_factory.mktemp("night")
    file = few.write(folder, "baseline: baseline\n")
    nightly(file, folder / "night", cache_dir=cache)
    return folder


@pytest.fixture
def copied(night, tmp_path):
    return shutil.copytree(night, tmp_path / "all")


def test_a_finished_night_and_its_baseline_are_verified(copied):
    results = [*verify(copied / "night"), *verify(copied / "baseline")]
    *runs, whole, baseline = results
    assert {r.kind for r in runs} == {"run"}
    assert (whole.kind, baseline.kind) == ("nightly", "baseline")
    assert {r.state for r in results} == {"verified"}
    assert exit_code(results) == 0
    assert whole.n_files >= 5


@pytest.mark.faults
def test_every_changed_file_of_a_baseline_and_of_a_night_is_named(copied):
    files = [p for folder in ("night", "baseline") for p in (copied / folder).rglob("*")]
    files = [p for p in files if p.is_file() and p.name != "checksums.sha256"]
    assert len(files) > 18
    for file in files:
        whole = file.read_bytes()
        if not whole:
            continue
        file.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
        root = copied / file.relative_to(copied).parts[0]
        results = verify(root)
        problems = [problem for result in results for problem in result.problems]
        assert any(str(file) in problem for problem in problems), (file, problems)
        assert exit_code(results) == 3
        file.write_bytes(whole)
    assert exit_code([*verify(copied / "night"), *verify(copied / "baseline")]) == 0


def test_a_summary_of_another_run_is_named(tmp_path, copied):
    run = next((copied / "night").rglob("manifest.json")).parent
    write_to(tmp_path / "run", measured_run(n_requests=60))
    shutil.copy(run / "summary.json", tmp_path / "run")
    (result,) = verify(tmp_path / "run")
    assert result.state == "damaged"
    assert "has no line" in result.problems[0]


@pytest.fixture
def cli(capsys, monkeypatch):
    return lambda *words: command_line(capsys, monkeypatch, *words)


def test_the_verb_prints_each_result_and_exits_3_unless_all_is_verified(cli, tmp_path):
    for name in ("good", "old", "bad"):
        write_to(tmp_path / name, measured_run(n_requests=60))
    (tmp_path / "old" / "checksums.sha256").unlink()
    (tmp_path / "bad" / "edges.parquet").unlink()
    assert cli("verify", tmp_path / "good") == (
        0, f"verified    {tmp_path / 'good'} (run, 5 files)\n", "",
    )  # fmt: skip
    code, out, _ = cli("verify", tmp_path)
    lines = out.splitlines()
    assert code == 3
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [
        "damaged", "verified", "damaged",
    ]  # fmt: skip
    assert lines[1].strip().startswith(f"{tmp_path / 'bad' / 'edges.parquet'}: is missing")
    code, out, _ = cli("verify", tmp_path / "old", "--json")
    (result,) = json.loads(out)
    assert (code, result["state"], result["kind"]) == (3, "damaged", "run")


def test_an_unfinished_run_is_not_verified(tmp_path):
    write_to(tmp_path / "run", measured_run(n_requests=60))
    text = (tmp_path / "run" / "checksums.sha256").read_text()
    kept = [line for line in text.splitlines(keepends=True) if "requests.parquet" not in line]
    (tmp_path / "run" / "checksums.sha256").write_text("".join(kept))
    (tmp_path / "run" / "requests.parquet").unlink()
    assert [r.state for r in verify(tmp_path / "run")] == ["unfinished"]


def test_a_folder_without_any_is_a_mistake(tmp_path):
    with pytest.raises(UsageError, match="holds no run"):
        verify(tmp_path)
    with pytest.raises(UsageError, match="not a directory"):
        verify(tmp_path / "none")
