"""Flags accept what is unambiguous; scenario files stay strict."""

import pytest

from loadgen.cli import parse
from loadgen.cli.flags import ScenarioFlags, TrafficFlags
from loadgen.cli.sides import read_margins
from loadgen.errors import ScenarioError, UsageError
from loadgen.sweep.axes import read_axis
from loadgen.workload.scenario import load_scenario

LENGTHS = {"input_len": 16, "output_len": 4}
FILE = """\
schema: 1
arrivals: {kind: poisson, rate: 8/s}
requests: {input_tokens: 8, output_tokens: 4}
phases: {measure: 10s}
slo:
  - ttft <= 500ms
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "q.yaml"
    path.write_text(FILE)
    return str(path)


def test_bare_numbers_have_the_unit_of_their_flag():
    traffic = TrafficFlags(rate="8", duration="30", warmup="2.5", **LENGTHS)
    scenario = parse.choose_scenario(ScenarioFlags(), traffic)
    assert scenario.arrivals.rate == 8.0
    assert (scenario.phases.warmup, scenario.phases.measure) == (2.5, 30.0)


def test_bare_numbers_change_a_file_too(file):
    scenario = parse.choose_scenario(ScenarioFlags(scenario=file), TrafficFlags(rate=" 3 "))
    assert scenario.arrivals.rate == 3.0


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30.0), ("0.5", 0.5), ("2m", 120.0), ("1h30m", 5400.0)]
)
def test_durations_of_flags_are_seconds(text, seconds):
    assert parse.read_duration_s("--budget", text) == seconds


@pytest.mark.parametrize("text", ["95%", "95", "0.95", "95.0"])
def test_a_confidence_is_per_cent_or_a_share(text):
    assert parse.read_confidence(text) == 0.95


@pytest.mark.parametrize("text", ["30", "1", "100", "0.3", "high", "-95"])
def test_a_confidence_that_cannot_be_is_refused_by_its_flag(text):
    with pytest.raises(UsageError, match=r"^--confidence"):
        parse.read_confidence(text)


def test_margins_and_axes_read_bare_numbers():
    assert read_margins(["5", "p99(ttft)=10%"]) == {"": 0.05, "p99(ttft)": 0.1}
    assert read_axis("rate=2,4").values == ("2/s", "4/s")
    assert read_axis("rate=2:6:2").values == ("2/s", "4/s", "6/s")
    assert read_axis("rate=30/min").values == ("30/min",)
    assert read_axis("arrivals.cv=2,4").values == (2, 4)


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("p99(ttft)<500ms", "p99(ttft) <= 500ms"),
        ("attainment > 99%", "attainment >= 99%"),
        ("ttft<=1s", "ttft<=1s"),
    ],
)
def test_strict_signs_of_a_flag_mean_the_allowed_signs(flag, text):
    assert parse.slo_flags([flag], None) == [text]


def test_an_slo_flag_names_a_preset_and_changes_it():
    assert parse.slo_flags(["chat"], None) == ["p99(ttft) <= 200ms", "p99(itl) <= 50ms"]
    changed = parse.slo_flags(["chat", "p99(ttft) < 1s"], ["e2el:9000"])
    assert changed == ["p99(itl) <= 50ms", "p99(ttft) <= 1s", "e2e_from_send <= 9000ms"]


@pytest.mark.parametrize(
    ("slo", "words"),
    [
        ("p99(tft)<1s", "--slo: 'p99(tft) <= 1s': unknown metric 'tft'; did you mean 'ttft'?"),
        ("ttft<500", "--slo: 'ttft <= 500': a duration needs its unit: write '500s' or '500ms'"),
        ("chatt", "a preset: did you mean 'chat'?"),
    ],
)
def test_a_mistake_in_an_slo_flag_names_the_flag_and_no_line_of_the_file(file, slo, words):
    with pytest.raises(UsageError) as caught:
        parse.choose_scenario(ScenarioFlags(scenario=file, slo=[slo]))
    assert words in str(caught.value)
    assert "q.yaml" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "by_flag", "flag"),
    [
        (["slo=[ttft < 1s]"], {}, "--set: slo.0: 'ttft < 1s'"),
        ([], {"--slo": {"slo": ["ttft < 1s"]}}, "--slo: slo.0: 'ttft < 1s'"),
        (["arrivals={kind: poisson, rate: 8}"], {}, "--set: arrivals.rate: a rate needs its unit"),
    ],
)
def test_a_flag_that_replaces_a_block_answers_for_what_is_inside(file, settings, by_flag, flag):
    with pytest.raises(ScenarioError) as caught:
        load_scenario(file, settings, by_flag=by_flag)
    assert str(caught.value).startswith(flag)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("arrivals: {kind: poisson, rate: '8'}", "'8' is not a rate; write '8/s'"),
        ("phases: {measure: '30'}", "'30' is not a duration; write '30s' or '30ms'"),
        ("slo: [p99(ttft)<500ms]", "'<' is not allowed in an SLO; write 'p99(ttft) <= 500ms'"),
    ],
)
def test_a_file_stays_strict_and_its_error_names_the_nearest_form(tmp_path, line, words):
    key = line.partition(":")[0]
    kept = [old for old in FILE.split("\n") if not old.startswith((key, "  -", "slo"))]
    path = tmp_path / "strict.yaml"
    path.write_text("\n".join([*kept, line]))
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path)
    assert words in str(caught.value)
