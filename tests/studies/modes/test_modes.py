"""Comparisons of modes: their variables, their files, and the statistics between modes."""

import csv
import io
import json
import re

import pytest
from msgspec import structs
from rich.console import Console
from typer.testing import CliRunner

from loadgen.cli.app import app
from loadgen.errors import UsageError
from loadgen.measure.statistics.intervals import BoundedSection, EstimateSection
from loadgen.studies.modes.charts import figures, paper
from loadgen.studies.modes.page import render
from loadgen.studies.modes.result import ModeCell
from loadgen.studies.modes.run import MODES, ComparedModes, ModesSpec, compare
from loadgen.studies.modes.spec import Mode, read_modes, read_rates, variant
from loadgen.studies.modes.table import QUANTITIES, leaders, rows, to_csv, write_all
from loadgen.studies.modes.verb import exit_code
from loadgen.studies.modes.view import notes, tables, times_text
from loadgen.workload.scenario import load_scenario, scenario_from_flags

BOTH = [Mode("static", {"batch_size": "4"}), Mode("chunked")]


def small(**more):
    return scenario_from_flags(
        rate="4/s", input_len=200, output_len=20, duration="5s", slo=["ttft <= 200ms"], **more
    )


def quiet():
    return Console(file=io.StringIO(), width=200)


def asked(**more):
    return ModesSpec(small(), BOTH, n_workers=1, **more)


@pytest.fixture(scope="module")
def cache(page_cache):
    return page_cache


@pytest.fixture(scope="module")
def compared(tmp_path_factory, cache):
    """Two modes, two rates, three seeds."""
    directory = tmp_path_factory.mktemp("modes")
    found = compare(asked(rates=[2.0, 6.0], n_seeds=3, cache_dir=cache), directory, quiet())
    return found, directory


def test_modes_are_read_with_their_parameters():
    assert read_modes("static:batch_size=8, chunked:token_budget=512:max_num_seqs=64,vllm_v0") == [
        Mode("static", {"batch_size": "8"}),
        Mode("chunked", {"token_budget": "512", "max_num_seqs": "64"}),
        Mode("vllm_v0"),
    ]
    assert read_modes("chunked:token-budget=512")[0].label == "chunked token_budget=512"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--modes: name at least one"),
        ("chunkd", "unknown batching mode 'chunkd'; did you mean 'chunked'"),
        ("chunked:512", "expected key=value after ':', got '512'"),
        ("chunked,chunked", "'chunked' appears twice"),
    ],
)
def test_invalid_modes_are_rejected(text, message):
    with pytest.raises(UsageError, match=message):
        read_modes(text)


@pytest.mark.parametrize(
    ("text", "rates"),
    [("2:8:2", [2, 4, 6, 8]), ("1:2:0.5", [1, 1.5, 2]), ("8,2,4.5", [2, 4.5, 8]), ("3", [3])],
)
def test_rates_are_a_range_or_a_list(text, rates):
    assert read_rates(text) == rates


@pytest.mark.parametrize("text", ["", "2:8", "8:2:1", "2:8:0", "0,4", "-1", "4,4", "1:9999:1", "x"])
def test_invalid_rates_are_rejected(text):
    with pytest.raises(UsageError, match="expected requests per second as from:to:step"):
        read_rates(text)


def test_a_variant_changes_rate_and_seed_alone():
    before, after = small().resolved(), variant(small(), 12.5, 3).resolved()
    assert after.pop("seed") == 3
    assert after["arrivals"].pop("rate") == "12.5/s"
    del before["seed"], before["arrivals"]["rate"]
    assert after == before
    with pytest.raises(UsageError, match=r"has no arrivals.rate to change \(its arrivals: users\)"):
        variant(load_scenario("closed_loop_users"), 2.0, 1)


def test_every_mode_gets_the_same_requests(compared):
    result = compared[0].result
    assert result.n_done == result.n_cells == 12
    schedules: dict[tuple[float, int], set[str]] = {}
    for cell in result.cells:
        key = cell.rate_per_s, cell.seed
        schedules.setdefault(key, set()).add(cell.schedule_sha256)
    assert len(schedules) == 6
    assert all(len(hashes) == 1 for hashes in schedules.values())
    assert len({next(iter(hashes)) for hashes in schedules.values()}) == 6


def test_an_interrupted_comparison_resumes(compared, tmp_path):
    found, directory = compared
    console = quiet()
    again = compare(asked(rates=[2.0, 6.0], n_seeds=3), directory, console)
    assert again.result.cells == found.result.cells
    told = console.file.getvalue()
    assert "12 of 12 cells exist already" in told
    assert "[12/12]" not in told
    wider = compare(asked(rates=[2.0], n_seeds=4), directory, quiet())
    assert wider.result.n_done == 8


class Interrupting(Console):
    """A console that raises Ctrl-C when the second cell is printed."""

    def print(self, *objects, **how):
        if objects and str(objects[0]).startswith("[2/"):
            raise KeyboardInterrupt
        super().print(*objects, **how)


def test_ctrl_c_keeps_the_finished_cells(tmp_path):
    found = compare(asked(n_seeds=3), tmp_path, Interrupting(file=io.StringIO()))
    assert found.was_interrupted
    assert (found.result.n_done, found.result.n_cells) == (2, 6)
    assert len(list((tmp_path / "cells").glob("*.json"))) == 2
    finished = compare(asked(n_seeds=3), tmp_path, quiet())
    assert not finished.was_interrupted
    assert finished.result.n_done == 6


WORDS = [
    *("modes", "--rate=4/s", "--input-len=200", "--output-len=20", "--duration=3s"),
    *("--slo=ttft<=200ms", "--modes=static,chunked", "--workers=1"),
]


def called(*words):
    return CliRunner().invoke(app, [*WORDS, *map(str, words)])


def test_the_command_continues_with_resume_only(tmp_path):
    out = f"--out={tmp_path / 'm'}"
    first = called(out)
    assert first.exit_code == 0, first.output
    assert str(tmp_path / "m" / "modes.html") in first.stderr
    refused = called(out)
    assert "holds a comparison of modes that began" in str(refused.exception)
    more = called(out, "--resume", "--seeds=2", "--json")
    assert more.exit_code == 0, more.output
    assert "2 of 4 cells exist already" in more.stderr
    assert MODES.read(tmp_path / "m").n_done == 4
    assert json.loads(more.stdout) == MODES.read(tmp_path / "m").to_json()
    other = called(out, "--resume", "--capacity")
    assert "other settings (capacity: False → True)" in str(other.exception)


def test_an_interrupt_names_the_command_that_continues(tmp_path, monkeypatch):
    def printing(*objects, **how):
        if str(objects[0]).startswith("[2/"):
            raise KeyboardInterrupt
        return Console.print(console, *objects, **how)

    written = io.StringIO()
    console = Console(file=written, width=300)
    monkeypatch.setattr(console, "print", printing)
    monkeypatch.setattr("loadgen.studies.modes.verb.stderr", lambda: console)
    result = called(f"--out={tmp_path / 'm'}", "--seeds=2")
    assert result.exit_code == 130
    assert (
        f"interrupted: 2 of 4 cells are finished; the same command with --out {tmp_path / 'm'} "
        "--resume continues" in written.getvalue()
    )
    assert MODES.read(tmp_path / "m").n_done == 2
    assert called(f"--out={tmp_path / 'm'}", "--seeds=2", "--resume").exit_code == 0
    assert MODES.read(tmp_path / "m").n_done == 4


def test_an_interrupt_before_the_first_cell_leaves_no_directory(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("loadgen.studies.modes.run.finished", interrupted)
    assert called(f"--out={tmp_path / 'm'}").exit_code == 130
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_parameter_is_reported_before_the_first_run(tmp_path):
    wrong = ModesSpec(small(), [*BOTH, Mode("chunked", {"batch_size": "3"})], n_workers=1)
    with pytest.raises(UsageError, match="unknown setting 'batch_size' of mode 'chunked'"):
        compare(wrong, tmp_path, quiet())
    assert not list(tmp_path.rglob("*.json"))


def test_single_runs_leave_ordinary_run_directories(tmp_path, cache):
    found = compare(asked(cache_dir=cache), tmp_path, quiet())
    runs = sorted((tmp_path / "runs").iterdir())
    assert [run.name.split("-")[0] for run in runs] == ["chunked", "static"]
    verdicts = [json.loads((run / "summary.json").read_text())["verdict"] for run in runs]
    by_mode = {cell.mode: cell.verdict for cell in found.result.cells}
    assert verdicts == [by_mode["chunked"], by_mode["static batch_size=4"]]
    assert all((run / "report.html").exists() for run in runs)


def cell(mode, seed, goodput, waits_s=None):
    """A cell whose only number of interest is the goodput."""
    numbers = dict.fromkeys(QUANTITIES, BoundedSection(value=None))
    numbers["goodput"] = BoundedSection(value=goodput, low=goodput - 1, high=goodput + 1)
    return ModeCell(
        mode=mode, rate_per_s=4.0, seed=seed, schedule_sha256="", ended="completed", verdict="met",
        is_trusted=True, reasons=[], classes={}, waits_s=waits_s or {}, n_due=10, n_ok=10,
        offered_rate_per_s=4.0, **numbers,
    )  # fmt: skip


@pytest.mark.faults
def test_a_mode_without_a_valid_run_is_named_and_exits_3(compared):
    cells = [cell("chunked", 1, 5.0), cell("chunked", 2, 5.0), cell("static", 1, 5.0)]
    for n_invalid, code, named in ((1, 0, []), (3, 3, ["chunked at 4/s", "static at 4/s"])):
        marked = [structs.replace(c, is_trusted=k >= n_invalid) for k, c in enumerate(cells)]
        result = structs.replace(compared[0].result, cells=marked)
        assert exit_code(ComparedModes(result, was_interrupted=False)) == code
        assert exit_code(ComparedModes(result, was_interrupted=True)) == 130
        assert [note for note in notes(result) if "no valid run" in note] == [
            f"{place}: no valid run" for place in named
        ]


def test_differences_are_paired_by_seed():
    # per seed +1, +2, +3 on top of a baseline that varies by 20: mean 2, s = 1,
    # t(0.975, 2) = 4.302653, so ± 4.302653 / √3 = 2.484138
    cells = [cell("a", seed, base) for seed, base in ((1, 10.0), (2, 20.0), (3, 30.0))]
    cells += [cell("b", seed, base) for seed, base in ((1, 11.0), (2, 22.0), (3, 33.0))]
    first, second = rows(cells, 0.95)
    found = second.difference["goodput"]
    assert (found.value, found.n) == (2.0, 3)
    assert found.low == pytest.approx(2 - 2.484138, abs=1e-5)
    assert found.high == pytest.approx(2 + 2.484138, abs=1e-5)
    assert first.difference["goodput"].value == 0
    assert second.goodput.value == 22.0
    assert second.goodput.high == pytest.approx(22 + 11 * 2.484138, abs=1e-4)


def test_the_best_mode_is_compared_with_the_runner_up_seed_by_seed():
    cells = [
        cell(mode, seed, goodput)
        for mode, values in {"a": (1.0, 2.0), "b": (9.0, 11.0), "c": (8.0, 9.0)}.items()
        for seed, goodput in enumerate(values)
    ]
    (leader,) = leaders(cells, 0.95)
    assert (leader.best, leader.runner_up) == ("b", "c")
    assert (leader.difference.value, leader.difference.n) == (1.5, 2)
    assert leaders(cells[:2], 0.95)[0].runner_up is None


def test_a_seed_that_only_one_mode_has_is_not_paired():
    cells = [cell("a", 1, 10.0), cell("b", 1, 11.0), cell("b", 2, 50.0)]
    assert rows(cells, 0.95)[1].difference["goodput"] == EstimateSection(value=1.0, n=1)


def test_one_run_keeps_its_own_interval_and_an_infinite_value_has_none():
    only = rows([cell("a", 1, 10.0)], 0.95)[0]
    assert only.goodput == EstimateSection(value=10.0, low=9.0, high=11.0, n=1)
    two = rows([cell("a", 1, 10.0), cell("a", 2, 10.0)], 0.95)[0]
    assert two.ttft_p99.value is None


def test_waits_are_given_per_request_the_longest_first():
    waits_s = {"x": {"no_seq_slot": 10.0, "behind": 5.0}, "y": {"behind": 30.0}}
    found = rows([cell("a", 1, 1.0, waits_s), cell("a", 2, 1.0, waits_s)], 0.95)[0]
    assert list(found.waits_s.items()) == [("behind", 3.5), ("no_seq_slot", 1.0)]


def test_csv_has_a_column_per_end_of_every_interval(compared):
    result = compared[0].result
    table = list(csv.DictReader(io.StringIO(to_csv(result.rows))))
    assert [row["mode"] for row in table] == ["static batch_size=4", "chunked"] * 2
    for line, row in zip(table, result.rows, strict=True):
        for end in ("value", "low", "high"):
            key = "goodput" if end == "value" else f"goodput_{end}"
            assert float(line[key]) == pytest.approx(getattr(row.goodput, end))
    assert "goodput_difference_high" in table[0]
    assert float(table[1]["goodput_ratio"]) == pytest.approx(result.rows[1].ratio["goodput"].value)


def test_everything_is_written(compared, tmp_path, cache):
    result = compared[0].result
    with MODES.opened("small", tmp_path) as place:
        write_all(place, result, cache)
    assert json.loads((tmp_path / "modes.json").read_text()) == result.to_json()
    assert MODES.read(tmp_path) == result
    assert (tmp_path / "goodput.svg").read_text().startswith("<svg")
    assert "static batch_size=4" in (tmp_path / "goodput.svg").read_text()
    assert (tmp_path / "goodput.pdf").read_bytes().startswith(b"%PDF-")
    lines = (tmp_path / "goodput.csv").read_text().splitlines()
    assert len(lines) == 5
    page = (tmp_path / "modes.html").read_text()
    assert "command_line: batching modes" in page
    assert 'id="difference"' in page


def test_the_page_and_the_terminal_say_the_same(compared):
    result = compared[0].result
    console = quiet()
    console.print(tables(result))
    told = console.file.getvalue()
    assert "goodput over static batch_size=4" in told
    assert "simulated (cost model): good for ranking, not for absolute numbers" in told
    assert set(figures(result)) == {"goodput", "difference", "kept"}
    assert len(paper(result)["vconcat"]) == 2
    ratios = told.partition("ratio to static batch_size=4")[2]
    lines = re.findall(r"^chunked at .*$", ratios, re.MULTILINE)
    assert [line[: len("chunked at 2/s")] for line in lines] == ["chunked at 2/s", "chunked at 6/s"]
    for line, row in zip(lines, result.rows[1::2], strict=True):
        ttft = row.ratio["ttft_p99"]
        assert f" {ttft.value:.2g} ({ttft.low:.2g} to {ttft.high:.2g})" in line


def test_no_figure_of_ten_rates_is_cut_in_100_columns(compared):
    """Rates that do not fit side by side go to a second table."""
    result = compared[0].result
    rates = [float(rate) for rate in range(2, 22, 2)]
    one_rate = [row for row in result.rows if row.rate_per_s == result.rates_per_s[0]]
    gap = EstimateSection(value=17.8, low=17.394, high=18.206, n=10)
    found = [
        structs.replace(row, rate_per_s=rate, difference={**row.difference, "goodput": gap})
        for rate in rates
        for row in one_rate
    ]
    page = io.StringIO()
    Console(file=page, width=100).print(
        tables(structs.replace(result, rates_per_s=rates, rows=found))
    )
    told = page.getvalue()
    beyond = told.partition("goodput over")[2].partition("times static")[0]
    assert beyond.count("+17.8") == 10
    assert beyond.count("±0.406") == 10
    for rate in rates:
        assert len(re.findall(rf"(?<!at) {rate:g}/s", told)) >= 3  # goodput, share, difference


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (0.0361, "0.036"),
        (1e-7, "<0.001"),
        (59.2, "59"),
        (99.8, "100"),
        (164.0, "164"),
        (2.4e3, ">1000"),
    ],
)
def test_a_ratio_is_never_a_power_of_ten(ratio, said):
    assert times_text(EstimateSection(value=ratio, n=1)) == said


def test_classes_and_waits_are_shown_where_there_is_one_rate(tmp_path, cache):
    scenario = load_scenario("mixed_classes", ["phases.warmup=0s", "phases.measure=5s"])
    asked_of_classes = ModesSpec(scenario, BOTH, n_workers=1, cache_dir=cache)
    result = compare(asked_of_classes, tmp_path, quiet()).result
    console = quiet()
    console.print(tables(result))
    told = console.file.getvalue()
    assert "  completion" in told
    assert "static group running" in told
    assert "ratio to static batch_size=4" in told
    assert set(figures(result)) == {"latencies", "kept"}
    for of_mode in (result.rows[:4], result.rows[4:]):
        assert of_mode[0].n_due == sum(row.n_due for row in of_mode[1:])
    page = render(result, cache)
    assert "static group running" in page
    ratios = page.partition('id="ratios">Ratios to static batch_size=4')[2]
    head, *lines = re.findall(r"<tr>(.*?)</tr>", ratios.partition("</table>")[0])
    titles = re.findall(r'<th scope="col">([^<]*)', head)[2:]
    assert len(lines) == 4  # chunked: all, and the three classes
    for line, row in zip(lines, result.rows[4:], strict=True):
        shown = dict(zip(titles, re.findall(r"<td>(.*?)</td>", line)[1:], strict=True))
        assert shown["TTFT p99"] == f"{row.ratio['ttft_p99'].value:.2g}"
        assert shown["ITL p99"] == "–"  # static delivers whole answers, without a gap
    assert "A single seed has no interval" in ratios


def test_ratios_are_paired_by_seed_and_averaged_as_factors():
    """Of twice, half and eight times as much the geometric mean is twice: ln 2 · (1, -1, 3) have
    the mean ln 2 and s = 2 ln 2, so the ends are factors e^(4.302653 · 2 ln 2 / √3) away."""
    cells = [cell("a", seed, base) for seed, base in ((1, 10.0), (2, 20.0), (3, 30.0))]
    cells += [cell("b", seed, base) for seed, base in ((1, 20.0), (2, 10.0), (3, 240.0))]
    found = rows(cells, 0.95)[1].ratio["goodput"]
    assert found.n == 3
    assert found.value == pytest.approx(2.0)
    assert found.low == pytest.approx(2 / 31.3040, rel=1e-4)
    assert found.high == pytest.approx(2 * 31.3040, rel=1e-4)


def test_there_is_no_ratio_to_nothing():
    found = rows([cell("a", 1, 0.0), cell("b", 1, 5.0)], 0.95)[1].ratio
    assert found["goodput"].value is None
    assert found["ttft_p99"].value is None  # unknown in both
