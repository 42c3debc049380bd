"""`slobench modes --capacity`: the searches, their files, and the result on page and terminal."""

import csv
import io
import json

import pytest
import yaml
from msgspec import structs
from rich.console import Console
from typer.testing import CliRunner

from loadgen.cli.app import app
from loadgen.studies.capacity.spec import CapacitySpec, question_of
from loadgen.studies.modes.capacity import MODE_CAPACITIES, compare_capacity, write_capacity
from loadgen.studies.modes.capacity_view import lead, notes, rows, tables
from loadgen.studies.modes.run import ModesSpec
from loadgen.studies.modes.spec import Mode
from loadgen.workload.scenario import scenario_from_flags

SAME = [Mode("chunked"), Mode("chunked", {"token_budget": "2048"})]  # 2048 is the default
DIFFERENT = [Mode("static", {"batch_size": "4"}), Mode("chunked")]


def small(ttft="200ms", rate="16/s"):
    return scenario_from_flags(
        rate=rate, input_len=200, output_len=20, num_prompts=120, slo=[f"ttft <= {ttft}"]
    )


def searched(directory, modes, console=None, scenario=None, n_seeds=3, **settings):
    scenario = scenario or small()
    question = question_of(CapacitySpec(scenario, "sim", attainment=0.9))
    spec = ModesSpec(
        scenario, modes, settings={"max_num_seqs": "4", **settings}, n_seeds=n_seeds, n_workers=1
    )
    console = console or Console(file=io.StringIO(), width=200)
    return compare_capacity(spec, question, directory, console)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("capacity")
    return searched(directory, DIFFERENT).result, directory


def test_identical_modes_have_the_ratio_one(tmp_path):
    result = searched(tmp_path, SAME).result
    (row,) = result.capacity.ratios
    assert (row.value, row.low, row.high, row.n) == (1.0, 1.0, 1.0, 3)
    assert lead(result)[1] == (
        "equal to that of chunked token_budget=2048: the same requests met the SLO on every seed"
    )


def hardware(path, speed):
    """An accelerator whose steps take 1 / `speed` of the time."""
    path.write_text(
        yaml.safe_dump({
            "name": path.stem,
            "bandwidth_bytes_per_s": 2.0e12 * speed,
            "flops_per_s": 3.0e14 * speed,
            "memory_bytes": 80.0e9,
            "step": f"{4 / speed}ms",
            "layer": f"{20 / speed}us",
            "sequence": f"{4 / speed}us",
        })
    )  # fmt: skip
    return str(path)


def test_a_server_twice_as_fast_with_half_the_limit_has_twice_the_capacity(tmp_path):
    """The same steps in half the time, at twice the rate, against half the limit."""
    by_speed = {}
    for speed, limit, rate in ((1, "400ms", "4/s"), (2, "200ms", "8/s")):
        file = hardware(tmp_path / f"speed{speed}.yaml", speed)
        found = searched(
            tmp_path / f"{speed}", DIFFERENT[1:], scenario=small(limit, rate), hardware=file
        )
        by_speed[speed] = [search.rate_per_s for search in found.result.searches]
    assert by_speed[2] == pytest.approx([2 * rate for rate in by_speed[1]], rel=0.01)


def test_modes_differ_by_their_paired_ratio(compared):
    result, _ = compared
    best, other = result.capacity.modes
    (row,) = result.capacity.ratios
    assert (row.best, row.mode) == ("chunked", "static batch_size=4")
    by_mode: dict[str, dict[int, float]] = {mode: {} for mode in result.modes}
    for search in result.searches:
        by_mode[search.mode][search.seed] = search.rate_per_s
        fine = [r.rate_per_s for r in search.runs if r.n_met >= 0.9 * r.n_due]
        missed = [r.rate_per_s for r in search.runs if r.n_met < 0.9 * r.n_due]
        assert max(fine) <= search.rate_per_s <= min(missed) <= 1.011 * max(fine)
    product = 1.0
    for seed in result.seeds:
        product *= by_mode["chunked"][seed] / by_mode["static batch_size=4"][seed]
    assert row.value == pytest.approx(product ** (1 / 3))
    assert row.value == pytest.approx(best.value / other.value)
    assert row.low < row.value < row.high


class Interrupting(Console):
    """A console that raises Ctrl-C when the third search ends."""

    def print(self, *objects, **how):
        if objects and str(objects[0]).startswith("[3/"):
            raise KeyboardInterrupt
        super().print(*objects, **how)


def test_an_interrupted_comparison_resumes_with_the_same_result(compared, tmp_path):
    result, _ = compared
    first = searched(tmp_path, DIFFERENT, Interrupting(file=io.StringIO()))
    assert first.was_interrupted
    assert first.result.n_done < first.result.n_searches == 6
    assert notes(first.result)[0].startswith("only 3 of 6 searches are finished")
    n_stored = len(list((tmp_path / "cells").iterdir()))
    again = searched(tmp_path, DIFFERENT)
    assert not again.was_interrupted
    assert again.result.searches == result.searches
    assert again.result.capacity == result.capacity
    assert len(list((tmp_path / "cells").iterdir())) == result.n_runs > n_stored


def test_a_mode_whose_runs_are_all_invalid_is_named(compared):
    result, _ = compared
    first, *others = result.searches
    assert result.without_valid_run == []
    invalid = [s for s in result.searches if s.mode == first.mode]
    invalid = [structs.replace(s, n_untrusted=len(s.runs)) for s in invalid]
    marked = structs.replace(
        result, searches=[*invalid, *(s for s in others if s.mode != first.mode)]
    )
    assert marked.without_valid_run == [first.mode]
    assert f"{first.mode}: no valid run" in notes(marked)


def test_a_mode_that_always_misses_is_listed_without_a_capacity(tmp_path):
    """A static batch streams nothing before its end, so no answer has a TTFT of 20 ms."""
    result = searched(tmp_path, DIFFERENT, scenario=small("20ms"), n_seeds=2).result
    static = [search for search in result.searches if search.mode != "chunked"]
    assert [search.outcome for search in static] == ["misses"]
    assert result.n_searches == result.n_done == 3
    assert result.capacity.ratios == []
    assert rows(result)[1][1] == "below 0.01562 req/s: the SLO is missed even there"


def test_files_page_and_terminal_show_the_same(compared, tmp_path, page_cache):
    result, _ = compared
    with MODE_CAPACITIES.opened("small", tmp_path) as place:
        write_capacity(place, result, page_cache)
    assert json.loads((tmp_path / "modes.json").read_text()) == result.to_json()
    assert MODE_CAPACITIES.read(tmp_path) == result
    lines = list(csv.DictReader(io.StringIO((tmp_path / "modes.csv").read_text())))
    assert len(lines) == result.n_runs
    written = io.StringIO()
    console = Console(file=written, width=100)
    console.print(tables(result))
    page, printed = (tmp_path / "modes.html").read_text(), written.getvalue()
    (ratio,) = result.capacity.ratios
    text = f"{ratio.value:.4g} ({ratio.low:.4g} to {ratio.high:.4g})"
    for shown in (page, printed):
        assert text in shown
        for row in result.capacity.modes:
            assert f"{row.value:.4g} req/s" in shown
    assert "windows of 120 requests" in page
    assert 'id="capacities"' in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--capacity", "--rates", "2,4"], "--capacity finds the rates itself"),
        (["--attainment", "90%"], "--attainment belongs to --capacity"),
        (["--capacity", "--users", "4"], "users have no rate to scale"),
    ],
)
def test_flags_that_contradict_are_rejected(words, message, tmp_path):
    traffic = ["--input-len", "9", "--output-len", "9", "--duration", "2s", "--slo", "ttft<=1s"]
    traffic += [] if "--users" in words else ["--rate", "2/s"]
    result = CliRunner().invoke(app, ["modes", *traffic, "--out", str(tmp_path / "m"), *words])
    assert result.exit_code == 2 or message in str(result.exception)
    assert message in result.output + str(result.exception)


def test_the_command_prints_the_ratio_and_the_path_of_its_page(tmp_path):
    traffic = ["--input-len", "200", "--output-len", "20", "--num-prompts", "120", "--rate", "16/s"]
    words = ["--slo", "p90(ttft)<=200ms", "--engine", "max_num_seqs=4", "--workers", "1"]
    modes = ["--modes", "chunked,chunked:token_budget=2048", "--seeds", "2", "--capacity"]
    out = ["--out", str(tmp_path / "m")]
    result = CliRunner().invoke(app, ["modes", *traffic, *words, *modes, *out])
    assert result.exit_code == 0, result.output
    assert "at which 90 % of the requests meet" in " ".join(result.output.split())
    assert str(tmp_path / "m" / "modes.html") in result.output.replace("\n", "")
    facts = json.loads((tmp_path / "m" / "modes.json").read_text())
    assert facts["attainment"] == 0.9
    assert len(facts["seeds"]) == 2
