"""The files of studies on disk: `verify` and `--resume` name each file that was changed."""

import shutil

import pytest
from typer.testing import CliRunner

from loadgen.archive.verify import exit_code
from loadgen.archive.verify import verify as verify_with
from loadgen.cli.app import app
from loadgen.cli.study_files import check_store
from loadgen.errors import RunInvalid
from tests.test_verbs import slobench

TRAFFIC = [
    *("--input-len=200", "--output-len=20", "--warmup=0s", "--duration=3s"),
    *("--slo=ttft<=200ms", "--slo=attainment>=90%"),
]
STUDIES = {
    "capacity": ["--target=sim", "--rate=4/s", "--engine=max_num_seqs=4", "--budget=40s"],
    "sweep": ["--target=sim", "--over=rate=2/s,4/s", "--repeats=1"],
    "modes": ["--rate=4/s", "--modes=static,chunked", "--workers=1"],
    "compare": ["--rate=4/s", "--target=sim", "--target=sim", "--repeats=2"],
    "size": ["--rate=4/s", "--capacity=capacity", "--peak=40/s", "--attainment=90%"],
}
EDITED = {
    "capacity": ["capacity.json", "study.json"],
    "sweep": ["sweep.yaml", "scenario.yaml", "rate=4_s/cell.json", "study.json"],
    "modes": ["cells/*.json", "study.json"],
    "compare": ["B/cell.json", "study.json"],
    "size": ["study.json"],
}
"""Study → the files that it reads when it is resumed."""


def words_of(study, *more):
    return [study, *TRAFFIC, *STUDIES[study], f"--out={study}", *more]


@pytest.fixture(scope="module")
def all_studies(tmp_path_factory):
    """A folder with a finished study of each kind, all in virtual time."""
    folder = tmp_path_factory.mktemp("studies")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for study in STUDIES:
            made = CliRunner().invoke(app, words_of(study))
            assert made.exit_code == 0, (study, made.output, made.exception)
    return folder


@pytest.fixture
def copied(all_studies, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(all_studies, tmp_path / "all", symlinks=True))
    return tmp_path / "all"


def verify(path):
    return verify_with(path, check_store)


def flip(path):
    """Changes a digit of a text, so that the file stays readable where it can."""
    text = path.read_text()
    at = max(text.rfind(digit) for digit in "0123456789")
    path.write_text(f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}")


def test_studies_are_verified_with_their_runs(copied):
    results = verify(copied)
    assert {r.state for r in results} == {"verified"}
    assert exit_code(results) == 0
    kinds = {r.path: r.kind for r in results if r.kind != "run"}
    assert kinds == {str(copied / study): study for study in STUDIES}
    assert sum(r.kind == "run" for r in results) >= 11
    (*runs, search) = verify(copied / "capacity")
    assert (search.kind, {r.kind for r in runs}) == ("capacity", {"run"})


def test_a_study_behind_a_link_is_verified_with_its_runs(copied):
    (copied / "newest").symlink_to(copied / "sweep")
    assert [r.kind for r in verify(copied / "newest")] == ["run", "run", "sweep"]
    assert not any("newest" in r.path for r in verify(copied)), "once, not through the link"


@pytest.mark.faults
def test_verify_names_each_changed_file_of_a_study(copied):
    files = [p for p in copied.rglob("*") if p.is_file() and p.name != "checksums.sha256"]
    runs = [path.parent for path in copied.rglob("manifest.json")]
    files = [p for p in files if not any(run in p.parents for run in runs)]
    files = [p for p in files if not p.name.startswith(".")]
    assert {p.name for p in files} >= {
        *(f"{study}.json" for study in STUDIES), "study.json", "cell.json", "compare.html",
        "sweep.parquet", "capacity.csv",
    }  # fmt: skip
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
        (study,) = (r for r in verify(copied) if r.state == "damaged")
        assert any(problem.startswith(f"{file}: ") for problem in study.problems), file
        file.write_bytes(whole)
    (copied / "sweep" / "checksums.sha256").unlink()
    (sweep,) = (r for r in verify(copied) if r.state == "damaged")
    assert sweep.problems[0].startswith(f"{copied / 'sweep' / 'checksums.sha256'}: is missing")


@pytest.mark.faults
@pytest.mark.parametrize("study", STUDIES)
def test_a_resumed_study_refuses_each_edited_file_that_it_reads(copied, capsys, monkeypatch, study):
    for pattern in EDITED[study]:
        path = next((copied / study).glob(pattern))
        whole = path.read_bytes()
        flip(path)
        code, out, err = slobench(capsys, monkeypatch, *words_of(study, "--resume"))
        assert (code, out) == (3, ""), (pattern, err)
        name = path.relative_to(copied)
        assert f"slobench: {name}: damaged: it does not match its line in checksums" in err
        path.write_bytes(whole)


@pytest.mark.faults
def test_a_sweep_does_not_go_on_from_an_edited_definition(copied, capsys, monkeypatch):
    flip(copied / "sweep" / "sweep.yaml")
    code, _, err = slobench(capsys, monkeypatch, "sweep", "--out=sweep", "--resume")
    assert code == 3
    assert "slobench: sweep/sweep.yaml: damaged" in err


@pytest.mark.faults
def test_runs_without_the_definition_of_their_cell_are_not_reused(copied):
    (copied / "compare" / "A" / "cell.json").unlink()
    resumed = CliRunner().invoke(app, words_of("compare", "--resume"))
    assert isinstance(resumed.exception, RunInvalid)
    assert "compare/A/cell.json: is missing" in str(resumed.exception)


def test_a_study_without_its_result_is_unfinished(copied):
    path = copied / "sweep" / "sweep.json"
    path.unlink()
    listed = copied / "sweep" / "checksums.sha256"
    lines = listed.read_text().splitlines(keepends=True)
    listed.write_text("".join(line for line in lines if not line.endswith("sweep.json\n")))
    assert [r.state for r in verify(copied / "sweep")] == ["verified", "verified", "unfinished"]


@pytest.mark.faults
def test_the_page_of_a_probe_is_not_written_from_an_edited_search(copied, capsys, monkeypatch):
    probe = copied / "capacity" / "probes" / "01"
    page = (probe / "report.html").read_bytes()
    flip(copied / "capacity" / "capacity.json")
    code, _, err = slobench(capsys, monkeypatch, "report", probe)
    assert code == 3
    assert f"{copied / 'capacity' / 'capacity.json'}: damaged" in err
    assert (probe / "report.html").read_bytes() == page
