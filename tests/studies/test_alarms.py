"""The alarms of a nightly pipeline of others, and which of them stand."""

import json

import numpy as np
import pytest

from loadgen.errors import UsageError
from loadgen.foreign.vllm_nights import VllmNight, VllmRuns, read_nights
from loadgen.studies.nightly.alarms import exit_code, judge_alarms, lines
from tests.foreign.results import vllm
from tests.test_verbs import slobench as command_line

LOAD = {"model_id": "m", "max_concurrency": 64}
TTFT = ("mean_ttft_ms",)


def nights(*values, load=LOAD, metric="mean_ttft_ms"):
    """A night for each list of numbers of its runs."""
    return [
        VllmNight(f"n{k}", "", {"c64": VllmRuns({metric: tuple(runs)}, load)})
        for k, runs in enumerate(values)
    ]


def judged(*values, threshold=0.02, **settings):
    (row,) = judge_alarms(
        nights(*values, **settings), (settings.get("metric", TTFT[0]),), threshold
    )
    return row


WALKING = ((100, 101, 99), (104, 105, 103), (98, 97, 99), (103, 102, 104), (99, 100, 98))
STEADY = ((100, 100.2, 99.8), (100.1, 99.9, 100), (99.9, 100.1, 100), (100, 99.8, 100.2))


def test_an_alarm_within_what_equal_nights_differ_by_is_noise():
    row = judged(*WALKING, (103, 104, 102))
    assert (row.is_alarm, row.word) == (True, "noise")
    assert (row.before, row.tonight) == (99, 103)
    assert row.change == pytest.approx(103 / 99 - 1)
    assert row.low < 0 < row.high


def test_an_alarm_beyond_that_stands():
    row = judged(*WALKING, (130, 131, 129))
    assert (row.is_alarm, row.word) == (True, "stands")
    assert row.low > 0.15
    assert row.p < 0.01


def test_a_change_below_the_threshold_that_no_equal_night_shows_was_missed():
    row = judged(*STEADY, (101.5, 101.6, 101.4))
    assert (row.is_alarm, row.word) == (False, "missed")
    assert judged(*STEADY, (98.5, 98.4, 98.6)).word == "quiet"  # faster


def test_more_throughput_is_better():
    assert judged(*STEADY, (90, 90.1, 89.9), metric="output_throughput").word == "stands"
    assert judged(*STEADY, (110, 110.1, 109.9), metric="output_throughput").word == "quiet"


def test_medians_alone_need_two_earlier_nights():
    singles = [(100,), (104,), (98,), (103,), (99,)]
    assert judged(*singles, (103,)).word == "noise"
    assert judged(*singles, (140,)).word == "stands"
    unknown = judged((100,), (103,))
    assert (unknown.word, unknown.is_alarm) == ("unknown", True)
    assert unknown.detail == "too few nights to know how much equal nights differ"


def test_nights_of_another_load_are_no_history():
    old = nights(*STEADY[:2], load={**LOAD, "model_id": "other"})
    (row,) = judge_alarms([*old, *nights((130, 131, 129))], TTFT, 0.02)
    assert (row.word, row.n_nights) == ("unknown", 0)
    assert row.detail == "the load differs from that of the nights before"


def test_equal_nights_are_called_worse_in_about_one_case_in_twenty():
    """True noise: nights 2 %, runs 1 %; 400 series of eight nights of three runs. The one-sided
    test at 5 % has a standard error of 1.1 points, so that 9 % is beyond three."""
    rng = np.random.default_rng(11)
    words, alarms = [], 0
    for _ in range(400):
        levels = 100 * np.exp(rng.normal(0, 0.02, 8))
        row = judged(*(level * np.exp(rng.normal(0, 0.01, 3)) for level in levels))
        words.append(row.word)
        alarms += row.is_alarm
    assert 0.15 < alarms / 400 < 0.4  # what a threshold of 2 % reports
    assert sum(word in ("stands", "missed") for word in words) / 400 < 0.09


def test_holm_covers_all_configurations_of_a_night():
    rng = np.random.default_rng(12)
    columns = {f"c{k}": 100 * np.exp(rng.normal(0, 0.02, (8, 3))) for k in range(40)}
    several = [
        VllmNight(f"n{night}", "", {name: VllmRuns({TTFT[0]: tuple(runs[night])}, LOAD)
                                    for name, runs in columns.items()})
        for night in range(8)
    ]  # fmt: skip
    words = [row.word for row in judge_alarms(several, TTFT, 0.01)]
    assert words.count("noise") > 3
    assert not {"stands", "missed"} & set(words)


def test_lines_name_what_stands_first_and_count_the_rest():
    rows = judge_alarms(nights(*STEADY, (110, 110.2, 109.8)), TTFT, 0.02)
    first, last = lines(rows)
    assert first.startswith("ALARM STANDS: c64: mean_ttft_ms +10 %: +10 % (+")
    assert last == "no alarm: 0 of 1"
    assert exit_code(rows) == 1


# Files


def result(ttft_ms, **changes):
    content = {key: value for key, value in vllm().items() if not isinstance(value, list)}
    numbers = {"mean_ttft_ms": ttft_ms, "mean_tpot_ms": 10.0, "output_throughput": 500.0}
    return {**content, **numbers, **changes}


def write(folder, **files):
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(content))


def week(path, *tonight):
    """Four nights of three runs with their medians, and tonight."""
    for night, runs in enumerate([*STEADY, tonight]):
        files = {f"bench_c64_run_{k}": result(ms) for k, ms in enumerate(runs, 1)}
        median = result(float(np.median(runs)), aggregation_method="median")
        write(path / f"2026-01-0{night + 1}", bench_c64=median, **files)
    return path


def test_repetitions_of_a_run_are_one_configuration_and_their_medians_are_not_counted_again(
    tmp_path,
):
    found = read_nights(week(tmp_path, 100, 100.2, 99.8), TTFT)
    assert [night.name for night in found] == [f"2026-01-0{k}" for k in range(1, 6)]
    assert {name: len(runs.numbers[TTFT[0]]) for name, runs in found[0].runs.items()} == {
        "bench-c64": 3
    }


def test_medians_are_used_where_the_runs_are_not_kept(tmp_path):
    for night in range(2):
        write(tmp_path / f"n{night}", bench_c64=result(100.0 + night, aggregation_method="median"))
    assert [night.runs["bench-c64"].numbers[TTFT[0]] for night in read_nights(tmp_path, TTFT)] == [
        (100.0,), (101.0,),
    ]  # fmt: skip


def test_nights_follow_each_other_in_time(tmp_path):
    write(tmp_path / "a", x=result(1.0, date="20260203-100000"))
    write(tmp_path / "b", x=result(2.0, date="20260201-100000"))
    assert [night.name for night in read_nights(tmp_path, TTFT)] == ["b", "a"]


def test_a_run_with_failed_requests_is_left_out_and_named(tmp_path):
    write(tmp_path / "a", x=result(1.0))
    write(tmp_path / "b", x_run_1=result(1.0, completed=3), x_run_2=result(2.0))
    _, last = read_nights(tmp_path, TTFT)
    assert last.runs["x"].numbers[TTFT[0]] == (2.0,)
    assert last.left_out == (f"{tmp_path}/b/x-run-1.json: 1 of 4 requests failed",)


def test_a_directory_that_cannot_be_judged_is_refused_with_its_place(tmp_path):
    write(tmp_path / "a", x=result(1.0))
    with pytest.raises(UsageError, match=r"expected a directory with two or more nights.*found 1"):
        read_nights(tmp_path, TTFT)
    write(tmp_path / "b", x=result(1.0))
    with pytest.raises(UsageError, match=r"a/x\.json: no metric mean_tft_ms; did you mean 'mean_t"):
        read_nights(tmp_path, ("mean_tft_ms",))
    bad = tmp_path / "b" / "x.json"
    bad.write_text(json.dumps(result(-1.0)))
    with pytest.raises(
        UsageError, match=r"b/x\.json: mean_ttft_ms: expected a number of 0 or more"
    ):
        read_nights(tmp_path, TTFT)
    bad.write_text(json.dumps(result(1.0), indent=1)[:-30])
    with pytest.raises(
        UsageError, match=r"b/x\.json:\d+: damaged JSON at character \d+: the file en"
    ):
        read_nights(tmp_path, TTFT)
    bad.unlink()
    write(tmp_path / "b" / "y", x_run_1=result(1.0), x_run_2=result(1.0, model_id="other"))
    with pytest.raises(UsageError, match="y/x: model_id: runs with tiny-llama and with other"):
        read_nights(tmp_path, TTFT)


@pytest.fixture
def cli(capsys, monkeypatch):
    return lambda *words: command_line(capsys, monkeypatch, *words)


def test_the_verb_prints_lines_and_answers_with_its_exit_code(cli, tmp_path):
    code, out, _ = cli("alarms", week(tmp_path / "worse", 120, 120.2, 119.8))
    assert code == 1
    assert out.splitlines()[0].startswith("ALARM STANDS: bench-c64: mean_ttft_ms +20 %")
    assert out.splitlines()[-1].startswith("night 2026-01-05 against 2026-01-01, 2026-01-02")
    code, out, _ = cli("alarms", week(tmp_path / "same", 100, 100.2, 99.8), "--metric", TTFT[0])
    assert (code, out.splitlines()[0]) == (0, "no alarm: 1 of 1")
    for night in "ab":
        write(tmp_path / "new" / night, x=result(100.0))
    assert cli("alarms", tmp_path / "new")[0] == 3


def test_the_verb_prints_json(cli, tmp_path):
    code, out, _ = cli("alarms", week(tmp_path, 120, 120.2, 119.8), "--json")
    content = json.loads(out)
    assert (code, content["kind"], content["threshold"]) == (1, "alarms", 0.02)
    words = {row["metric"]: row["word"] for row in content["alarms"]}
    assert words == {"mean_ttft_ms": "stands", "mean_tpot_ms": "quiet",
                     "output_throughput": "quiet"}  # fmt: skip
