"""Every verb on recorded results finds them by path, by name in runs/, and as `latest`: runs and
searches alike, on the command line and in Python."""

import json
from pathlib import Path

import pytest

import slobench as sb
from loadgen.archive.names import directory_of, runs_of
from loadgen.errors import UsageError
from tests.runs import measured_run, write_to
from tests.test_verbs import slobench as command_line

FORMS = ("runs/{}", "{}", "./runs/{}/")
SWEEP = "sweep-quickstart"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with the runs `a` and `b` and a sweep with two runs, in runs/."""
    home = tmp_path_factory.mktemp("home")
    for name, seed in (("a", 7), ("b", 8)):
        write_to(home / "runs" / name, measured_run(60, slo=["ttft <= 1s"], seed=seed))
    sb.sweep(
        "quickstart", "sim", {"arrivals.rate": ["2/s", "4/s"]}, home / "runs" / SWEEP,
        repeats=1, duration="4s", warmup="0s",
    )  # fmt: skip
    return home


@pytest.fixture
def cli(capsys, monkeypatch, home):
    monkeypatch.chdir(home)
    return lambda *words: command_line(capsys, monkeypatch, *words)


def point_latest(home: Path, name: str) -> None:
    link = home / "runs" / "latest"
    link.unlink(missing_ok=True)
    link.symlink_to(name, target_is_directory=True)


def names_of(home: Path, name: str) -> list[str]:
    point_latest(home, name)
    return [form.format(word) for form in FORMS for word in (name, "latest")]


def test_a_study_becomes_the_latest_result(home):
    link = home / "runs" / "latest"
    link.unlink(missing_ok=True)
    sb.sweep(
        "quickstart", "sim", {"seed": [1]}, home / "runs" / "newer", repeats=1, duration="2s",
        warmup="0s",
    )  # fmt: skip
    assert link.readlink() == Path("newer")


@pytest.mark.parametrize("verb", ["report", "rescore", "verify"])
@pytest.mark.parametrize("name", ["a", SWEEP])
def test_a_verb_takes_each_name_of_a_run_and_of_a_search(cli, home, verb, name):
    outputs = set()
    for given in names_of(home, name):
        code, out, err = cli(verb, given, "--json")
        assert code == 0, (given, err)
        found = json.loads(out)
        outputs.add(len(found) if isinstance(found, list) else 1)
    n_runs = {"a": 1, SWEEP: 2}[name]
    n_found = {"report": 1, "verify": n_runs + (name == SWEEP)}  # of a search its own files, too
    assert outputs == {n_found.get(verb, n_runs)}


@pytest.mark.parametrize("name", ["a", SWEEP])
def test_an_export_takes_each_name(cli, home, name):
    tables = {cli("export", given, "-f", "csv")[1] for given in names_of(home, name)}
    assert len(tables) == 1
    [table] = tables
    assert len(table.splitlines()) == {"a": 2, SWEEP: 3}[name]


def test_a_comparison_takes_each_name(cli, home):
    point_latest(home, "b")
    verdicts = set()
    for a, b in (("a", "b"), ("runs/a", "latest"), ("./runs/a/", "runs/latest")):
        code, out, err = cli("compare", a, b, "--within-run", "--json")
        assert code == 0, err
        verdicts.add(json.loads(out)["verdict"])
    assert len(verdicts) == 1


def test_the_report_of_a_search_prints_its_result_again(cli, home):
    code, out, err = cli("report", SWEEP)
    assert code == 0
    assert out.startswith("at least 4 req/s: every load met the SLO\n")
    assert err.endswith(f"report: runs/{SWEEP}/report.html\n")


def test_other_slos_of_a_search_are_refused_with_the_command_that_has_them(cli):
    code, out, err = cli("report", SWEEP, "--slo", "ttft <= 1ms")
    assert (code, out) == (2, "")
    assert f"slobench rescore runs/{SWEEP} --slo" in err


def test_an_unknown_name_names_the_nearest(cli):
    for verb in ("report", "rescore", "verify"):
        code, _, err = cli(verb, "swep-quickstart")
        assert code == 2
        assert f"did you mean '{SWEEP}'?" in err


def test_python_takes_the_same_names(home, monkeypatch):
    monkeypatch.chdir(home)
    point_latest(home, "a")
    assert sb.read_run("a").manifest.run == sb.read_run("runs/latest").manifest.run
    by_name, by_path = (sb.summarize(name) for name in ("latest", home / "runs" / "a"))
    assert by_name.counts == by_path.counts
    assert sb.compare("runs/a", "b", within_run=True).a == ("runs/a",)
    assert sb.export("a", "csv") == sb.export([sb.read_run("latest")], "csv")
    assert sb.export(SWEEP, "csv").count(b"\n") == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda: sb.run("no_such_scenario", "sim"),
        lambda: sb.run("quickstart", "sim", engin="shape=8b"),
        lambda: sb.run("quickstart", "sim", rate="fast"),
        lambda: sb.run("quickstart", "sim", slo=["tftt <= 1s"]),
        lambda: sb.simulate("quickstart", rat=3),
        lambda: sb.read_run("no_such_run"),
        lambda: sb.summarize("no_such_run"),
        lambda: sb.summarize("runs/a", confidence=0.2),
        lambda: sb.compare("no_such_run", "a"),
        lambda: sb.compare("a", "b", margin=3),
        lambda: sb.export("no_such_run", "csv"),
        lambda: sb.export("a", "cvs"),
        lambda: sb.sweep("quickstart", "sim", {}, engin=""),
        lambda: sb.capacity("quickstart", "sim", engin=""),
    ],
)
def test_mistakes_in_python_are_usage_errors(home, monkeypatch, call):
    monkeypatch.chdir(home)
    with pytest.raises(UsageError):
        call()


def test_flags_are_keywords(tmp_path):
    run = sb.run(
        "quickstart", "sim", tmp_path / "run", rate=8, duration=3, warmup="0s", seed=5,
        slo=["ttft < 200ms", "attainment >= 90%"],
    )  # fmt: skip
    window = run.manifest.window
    assert (run.manifest.requested_rate_per_s, window.warmup_s, window.measure_s) == (8.0, 0.0, 3.0)
    assert run.manifest.seed == 5
    assert run.manifest.slo == ("ttft <= 200ms", "attainment >= 90%")
    again = sb.simulate(sb.load_scenario("quickstart"), rate="8/s", duration="3s", warmup=0, seed=5)
    assert again.manifest.schedule_sha256 == run.manifest.schedule_sha256


def test_a_path_comes_before_a_name_and_links_are_not_followed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/x", "x"):
        write_to(tmp_path / name, measured_run(30))
    assert directory_of("x") == Path("x")
    (tmp_path / "runs" / "latest").symlink_to("x", target_is_directory=True)
    assert runs_of(["runs", "latest"]) == [Path("runs/x")]


def test_an_unknown_name_is_refused_with_the_results_there_are(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        directory_of("lates")
    assert str(caught.value) == "lates: no such run or search here or in runs/; runs/ has none"
    monkeypatch.chdir(home)
    with pytest.raises(UsageError, match=r"here or in runs/; did you mean 'latest'\? \(known: "):
        directory_of("lates")
