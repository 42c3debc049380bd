"""A sweep in virtual time: what it leaves, what follows for its cells, and going on with it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from msgspec import structs
from pyarrow import parquet
from rich.console import Console
from typer.testing import CliRunner

import slobench as sb
from loadgen.cli.app import app
from loadgen.errors import TargetError, UsageError
from loadgen.measure.statistics.intervals import EstimateSection
from loadgen.run.run_options import RunOptions
from loadgen.studies.cells.runner import CellFailure
from loadgen.studies.sweep.charts import figures
from loadgen.studies.sweep.numbers import rows
from loadgen.studies.sweep.page import render
from loadgen.studies.sweep.points import Base
from loadgen.studies.sweep.result import AxisSection, SweepResult, SweptRun
from loadgen.studies.sweep.run import SWEEP, Swept, forecast
from loadgen.studies.sweep.spec import is_sweep_file, read_sweep_file, sweep_from_flags, sweep_spec
from loadgen.studies.sweep.verb import exit_code
from loadgen.studies.sweep.view import forecast_table, notes, shown_columns, tables
from loadgen.workload.scenario import load_scenario

SHORT = ["phases.warmup=0s", "phases.measure=4s"]
OVER = {"rate": ["4/s", "16/s"], "engine.mode": ["chunked", "static"]}


@pytest.fixture(scope="module")
def cache(page_cache):
    return page_cache


@pytest.fixture(scope="module")
def swept(tmp_path_factory, cache):
    return sb.sweep(
        load_scenario("quickstart", SHORT), "sim", OVER, tmp_path_factory.mktemp("sweep"),
        engine="shape=8b,hardware=4xh200", cache_dir=cache,
    )  # fmt: skip


def in_words(renderable):
    text = io.StringIO()
    Console(width=100, file=text).print(renderable)
    return text.getvalue()


def asked(over, **more):
    base = Base(load_scenario("quickstart", SHORT), "sim", RunOptions())
    return sweep_spec(sweep_from_flags({"over": over, **more}), base)


def numbers(cell, repeat, tokens_per_s, ttft_s, gpus=1):
    """What is kept of a run, without one."""
    measures = {"output_tokens_per_s": tokens_per_s, "p99(ttft)": ttft_s}
    names = ("requests_per_s", "goodput", "attainment", "error_rate", "p50(ttft)", "p50(ttfat)",
             "p99(ttfat)", "p50(tpot)", "p99(tpot)", "p99(itl)", "p99(e2e)")  # fmt: skip
    return SweptRun(
        cell=cell, repeat=repeat, directory=f"{cell}/r{repeat}", seed=repeat, schedule_sha256="",
        verdict="met", exit_code=0, is_trusted=True, reasons=[], n_due=10, offered_rate_per_s=1.0,
        gpus=gpus, gpus_are_declared=True, cost_is_infinite=ttft_s is None,
        measures=dict.fromkeys(names, EstimateSection(value=None, n=1))
        | {name: EstimateSection(value=value, n=1) for name, value in measures.items()},
    )  # fmt: skip


def test_every_cell_has_its_runs_and_its_numbers(swept):
    assert [row["cell"] for row in swept.rows] == [
        "rate=4_s+mode=chunked", "rate=4_s+mode=static",
        "rate=16_s+mode=chunked", "rate=16_s+mode=static",
    ]  # fmt: skip
    assert [row["n"] for row in swept.rows] == [3] * 4
    assert (swept.result.n_done, swept.result.n_failed) == (12, 0)
    for row in swept.rows:
        directories = [swept.directory / run["directory"] for run in row["runs"]]
        of_runs = [sb.summarize(sb.read_run(d)) for d in directories]
        for text, metric, key in (("p99(ttft)", "ttft_s", "p99"), ("p50(tpot)", "tpot_s", "p50")):
            values = [s.metrics[metric].with_failures[key].value for s in of_runs]
            if metric == "tpot_s" and "static" in row["cell"]:  # each answer comes in one piece
                assert row["measures"][text]["value"] is None
                continue
            assert row["measures"][text]["value"] == pytest.approx(sum(values) / 3)
        tokens = [s.throughput.output_tokens_per_s / 4 for s in of_runs]
        assert row["benefit"]["value"] == pytest.approx(sum(tokens) / 3)
        assert (row["gpus"], row["gpus_are_declared"]) == (4, True)


def test_the_front_is_the_faster_mode(swept):
    by_cell = {row["cell"]: row for row in swept.rows}
    assert by_cell["rate=16_s+mode=chunked"]["is_front"]
    assert not by_cell["rate=16_s+mode=static"]["is_front"]
    assert by_cell["rate=16_s+mode=static"]["beaten_by"] == "rate=16_s+mode=chunked"


def test_the_files_hold_the_same_numbers(swept):
    said = json.loads((swept.directory / "sweep.json").read_text())
    assert said == swept.result.to_json()
    assert SWEEP.read(swept.directory) == swept.result
    with (swept.directory / "sweep.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [line["engine.mode"] for line in table] == ["chunked", "static"] * 2
    first = said["rows"][0]["measures"]["p99(ttft)"]
    assert float(table[0]["p99(ttft)_high"]) == pytest.approx(first["high"])
    runs = parquet.read_table(swept.directory / "sweep.parquet").to_pandas()
    assert len(runs) == 12
    mean = runs[runs.cell == "rate=4_s+mode=chunked"]["p99(ttft)"].mean()
    assert mean == pytest.approx(first["value"])


def test_the_page_links_every_report_and_names_the_front(swept, cache):
    page = (swept.directory / "report.html").read_text()
    assert set(figures(swept.result)) == {"tradeoff", "goodput"}
    for row in swept.rows:
        for run in row["runs"]:
            assert f'href="{run["directory"]}/report.html"' in page
            assert (swept.directory / run["directory"] / "report.html").is_file()
    assert "beaten by rate=16_s+mode=chunked" in page
    assert "https://" not in page.split("<script")[0]


def test_the_page_has_columns_of_ttfat_where_a_cell_has_reasoning(swept):
    assert swept.result.rows[0].measures["p99(ttfat)"] == swept.result.rows[0].measures["p99(ttft)"]
    assert "p50(ttfat)" not in shown_columns(swept.result)
    first, *others = swept.result.rows
    later = {**first.measures, "p50(ttfat)": EstimateSection(value=9.0, n=3)}
    reasoning = structs.replace(
        swept.result, rows=[structs.replace(first, measures=later), *others]
    )
    assert shown_columns(reasoning)[:3] == ["p50(ttft)", "p50(ttfat)", "p99(ttfat)"]  # and the cost


def test_the_terminal_says_it_in_100_columns(swept):
    text = in_words(tables(swept.result))
    assert max(map(len, text.splitlines())) <= 100
    assert "quickstart against sim: arrivals.rate and engine.mode varied, 3 runs a cell" in text
    assert "note: simulated" in text


def test_what_is_there_is_used_and_the_rest_is_run(swept, cache):
    again = sb.sweep(
        load_scenario("quickstart", SHORT), "sim", {**OVER, "rate": ["4/s", "16/s", "8/s"]},
        swept.directory, engine="shape=8b,hardware=4xh200", cache_dir=cache, repeats=1, resume=True,
    )  # fmt: skip
    assert [row["cell"] for row in again.rows if row["series"] == "static"] == [
        "rate=4_s+mode=static", "rate=16_s+mode=static", "rate=8_s+mode=static",
    ]  # fmt: skip
    assert again.rows[0]["measures"]["p99(ttft)"]["n"] == 1


def test_another_scenario_in_the_same_place_is_refused_and_changes_nothing(swept):
    before = (swept.directory / "scenario.yaml").read_text()
    with pytest.raises(UsageError, match=r"scenario\.phases\.measure: '4s' → '5s'"):
        sb.sweep(
            load_scenario("quickstart", ["phases.warmup=0s", "phases.measure=5s"]), "sim", OVER,
            swept.directory, engine="shape=8b,hardware=4xh200", resume=True,
        )  # fmt: skip
    assert (swept.directory / "scenario.yaml").read_text() == before


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="exists already and holds no sweep"):
        sb.sweep("quickstart", "sim", {"rate": ["2/s"]}, tmp_path)


def test_a_finished_sweep_is_not_continued_without_resume(swept):
    with pytest.raises(UsageError, match=r"holds a sweep that began .* add --resume"):
        sb.sweep("quickstart", "sim", {"rate": ["2/s"]}, swept.directory)


def test_a_sweep_that_ended_before_its_first_run_begins_again_without_resume(tmp_path, cache):
    with SWEEP.opened("quickstart", tmp_path) as place:
        for name in ("sweep.yaml", "scenario.yaml", "cell.json"):
            place.write_text(name, "")
    swept = sb.sweep(
        load_scenario("quickstart", SHORT), "sim", {"rate": ["4/s"]}, tmp_path, repeats=1,
        cache_dir=cache,
    )  # fmt: skip
    assert swept.result.n_done == 1


def test_a_first_look_into_a_sweep_is_refused_before_it_sends_anything(swept):
    words = ["sweep", "--target=http://127.0.0.1:9", f"--out={swept.directory}"]
    result = CliRunner().invoke(app, words)
    assert "holds a sweep that began" in str(result.exception)


def test_a_first_look_that_finds_no_rate_leaves_no_directory(tmp_path):
    words = ["sweep", "--target=http://127.0.0.1:9", f"--out={tmp_path / 's'}"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, TargetError)
    assert list(tmp_path.iterdir()) == []


def test_resume_alone_continues_from_the_directory(tmp_path):
    out = tmp_path / "s"
    traffic = ["--rate=4/s", "--input-len=64", "--output-len=8", "--duration=3s"]
    words = ["sweep", *traffic, "--target=sim", "--over=engine.mode=chunked,static",
             "--repeats=1", f"--out={out}"]  # fmt: skip
    assert CliRunner().invoke(app, words).exit_code == 0
    first = SWEEP.read(out)
    made = {path: path.stat().st_mtime_ns for path in out.glob("*/r1/requests.parquet")}
    assert len(made) == 2
    for more in ([], ["--repeats=2"], ["--over=engine.mode=chunked,static,continuous"]):
        result = CliRunner().invoke(app, ["sweep", f"--out={out}", "--resume", *more])
        assert result.exit_code == 0, (result.output, result.exception)
        assert {path: path.stat().st_mtime_ns for path in made} == made
    last = SWEEP.read(out)
    assert (first.n_runs, last.n_runs, len(last.rows)) == (2, 6, 3)
    assert last.rows[0].runs[0] == first.rows[0].runs[0]
    again = CliRunner().invoke(app, [*words, "--resume"])  # the same command
    assert again.exit_code == 0, (again.output, again.exception)
    assert {path: path.stat().st_mtime_ns for path in made} == made


def test_a_dry_run_makes_no_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["sweep", "quickstart", "--target=sim", "--over=rate=2/s", "--dry-run", "--json"]
    shown = json.loads(CliRunner().invoke(app, words).stdout)
    assert shown["directory"].startswith("runs/sweep-quickstart-20")
    assert len(shown["turns"]) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_forecast_counts_what_is_left(swept, tmp_path):
    base = Base(load_scenario("quickstart", SHORT), "http://localhost:1", RunOptions())
    here = sweep_spec(sweep_from_flags({"over": {"rate": ["2/s", "4/s"]}, "repeats": 2}), base)
    found = forecast(here, tmp_path)
    assert len(found.turns) == 4
    assert found.arrivals_s == 4 * 4.0
    assert found.drain_s == 4 * base.scenario.phases.drain
    assert found.n_starts == 1
    said = {
        "directory": "d", "arrivals_s": 16.0, "drain_s": 0.0, "n_starts": 1,
        "turns": [{"cell": t.cell.name, "repeat": t.repeat, "is_done": False} for t in found.turns],
    }  # fmt: skip
    assert "2 cells, 4 runs, 4 still to measure: 16 s of arrivals" in in_words(forecast_table(said))


def test_throughput_counts_per_gpu_and_failures_as_infinitely_slow():
    wanted = asked({"rate": ["2/s", "4/s", "8/s"]}, repeats=2)
    names = [cell.name for cell in wanted.cells]
    runs = [
        *(numbers(names[0], k, 100.0 + k, 0.1 + k / 100) for k in (1, 2)),
        *(numbers(names[1], k, 300.0 + k, 0.1 + k / 100, gpus=4) for k in (1, 2)),
        numbers(names[2], 1, 900.0, None),
        numbers(names[2], 2, 900.0, 0.01),
    ]
    one, four, failed = rows(wanted, runs, [])
    assert one.benefit.value == 101.5
    assert four.benefit.value == 75.375
    assert failed.cost_is_infinite
    assert failed.cost == EstimateSection(value=None, n=2)
    assert [row.is_front for row in (one, four, failed)] == [True, False, True]
    assert four.beaten_by == names[0]


def test_a_cell_without_runs_is_on_no_front_and_says_why(cache):
    wanted = asked({"rate": ["2/s", "4/s"]}, repeats=1)
    one, two = wanted.cells
    found = rows(wanted, [numbers(one.name, 1, 5.0, 0.1)], [CellFailure(two, 1, "it ended <b>")])
    assert [row.is_front for row in found] == [True, False]
    told = SweepResult(
        slobench="1", command=["slobench"], scenario="s", scenario_text="", slo=[], targets=["t"],
        axes=[AxisSection(key="arrivals.rate", values=[])], how="grid", along="arrivals.rate",
        cost="p99(ttft)", cost_unit="s", benefit="output_tokens_per_s", repeats=1, confidence=0.95,
        order_seed=0, n_runs=2, n_done=1, n_failed=1, n_untrusted=0, rows=found,
    )  # fmt: skip
    text = in_words(tables(told))
    assert "note: rate=4_s: no run: it ended <b>" in text
    assert "failed" in text
    page = render(told, cache)
    assert "it ended &lt;b&gt;" in page


@pytest.mark.faults
@pytest.mark.parametrize(("trusted", "code"), [((True, False), 0), ((False, False), 3)])
def test_a_cell_without_a_valid_run_is_named_and_exits_3(trusted, code):
    wanted = asked({"rate": ["2/s", "4/s"]}, repeats=2)
    one, two = wanted.cells
    runs = [numbers(one.name, 1, 5.0, 0.1), numbers(one.name, 2, 5.0, 0.1)]
    runs += [
        structs.replace(numbers(two.name, repeat, 5.0, 0.1), is_trusted=is_trusted)
        for repeat, is_trusted in enumerate(trusted, start=1)
    ]
    result = SweepResult(
        slobench="1", command=["slobench"], scenario="s", scenario_text="", slo=[], targets=["t"],
        axes=[AxisSection(key="arrivals.rate", values=[])], how="grid", along="arrivals.rate",
        cost="p99(ttft)", cost_unit="s", benefit="output_tokens_per_s", repeats=2, confidence=0.95,
        order_seed=0, n_runs=4, n_done=4, n_failed=0, n_untrusted=trusted.count(False),
        rows=rows(wanted, runs, []),
    )  # fmt: skip
    swept = Swept(result, runs, Path(), was_interrupted=False)
    assert exit_code(swept, None) == code
    assert ("rate=4_s: no valid run" in notes(result)) is (code == 3)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"metric": "goodput"}, "higher is better"),
        ({"metric": "p99(tfft)"}, "did you mean 'ttft'"),
        ({"throughput": "attainment"}, "is not a rate"),
        ({"along": "engine.mode"}, "is not a swept key with numbers (those are: arrivals.rate)"),
        ({"repeats": 0}, "repeats"),
        ({"how": "gird"}, "how"),
        ({"repeat": 3}, "did you mean 'repeats'"),
    ],
)
def test_a_wrong_option_is_told(more, words):
    with pytest.raises(UsageError) as told:
        asked({"rate": ["2/s"], "engine.mode": ["chunked"]}, **more)
    assert words in str(told.value)


def test_lines_follow_the_load_or_what_is_asked_for():
    assert asked({"engine.token_budget": [256], "rate": ["2/s"]}).along == "arrivals.rate"
    assert asked({"engine.token_budget": [256]}).along == "engine.token_budget"
    assert asked({"engine.mode": ["chunked"]}).along == ""


def test_a_sweep_file_says_the_same_as_the_flags(tmp_path):
    (tmp_path / "t.yaml").write_text("url: http://localhost:1\n")
    file = tmp_path / "s.yaml"
    file.write_text(
        "scenario: quickstart\ntarget: t.yaml\nengine: {mode: chunked, max_num_seqs: 8}\n"
        "set: {phases.measure: 4s}\nover:\n  rate: [2/s, 4/s]\nrepeats: 5\ndrain: 5s\n"
    )
    assert is_sweep_file(str(file))
    assert not is_sweep_file(str(tmp_path / "t.yaml"))
    assert not is_sweep_file("quickstart")
    found = read_sweep_file(file, {"repeats": 2, "over": {"engine.mode": ["static"]}})
    assert found.target == str(tmp_path / "t.yaml")
    assert found.engine == "mode=chunked,max_num_seqs=8"
    assert found.settings() == ['phases.measure="4s"']
    assert (found.repeats, found.drain) == (2, 5.0)
    assert list(found.over) == ["rate", "engine.mode"]
    file.write_text("over: {rate: [2/s]}\nrepeats: many\nmetrik: x\n")
    with pytest.raises(UsageError) as told:
        read_sweep_file(file, {})
    lines = str(told.value).splitlines()
    assert lines[0].startswith(f"{file}:2: repeats: ")
    assert "did you mean 'metric'" in lines[1]
