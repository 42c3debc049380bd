"""Flags accept what is unambiguous; scenario files stay strict."""

from typing import Any

import numpy as np
import pytest

from loadgen.cli import parse
from loadgen.cli.flags import ScenarioFlags, TrafficFlags
from loadgen.errors import ScenarioError, SlobenchError, UsageError
from loadgen.lab.simulate import simulate
from loadgen.run.run_options import RunOptions
from loadgen.studies.compare.sides import read_margins
from loadgen.studies.sweep.axes import read_axis
from loadgen.studies.sweep.points import Base, cells_of
from loadgen.workload.arrivals import Users
from loadgen.workload.renewal import Poisson
from loadgen.workload.scenario import load_scenario
from loadgen.workload.schedule import make_plan
from loadgen.workload.traffic_flags import FLAGS
from targets.endpoint import load_target

LENGTHS: dict[str, Any] = {"input_len": 16, "output_len": 4}
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
    assert isinstance(scenario.arrivals, Poisson)
    assert scenario.arrivals.rate == 8.0
    assert (scenario.phases.warmup, scenario.phases.measure) == (2.5, 30.0)


def test_bare_numbers_change_a_file_too(file):
    scenario = parse.choose_scenario(ScenarioFlags(scenario=file), TrafficFlags(rate=" 3 "))
    assert isinstance(scenario.arrivals, Poisson)
    assert scenario.arrivals.rate == 3.0


@pytest.mark.parametrize("name", FLAGS)
def test_each_traffic_flag_sets_a_key_that_scenarios_have(name):
    """In an open or a closed loop; no key accepts a list with a list."""
    messages = []
    for scenario in ("quickstart", "closed_loop_users"):
        with pytest.raises(ScenarioError) as caught:
            load_scenario(scenario, [f"{FLAGS[name].key}=[[]]"])
        messages.append(str(caught.value))
    assert not all("unknown key" in message for message in messages), messages


def test_each_traffic_flag_sets_its_own_key_on_top_of_a_file(file):
    traffic = TrafficFlags(
        rate="3", input_len=16, output_len=5, warmup="2", duration="20", max_concurrency=7,
        top_p=0.9,
    )  # fmt: skip
    scenario = parse.choose_scenario(ScenarioFlags(scenario=file), traffic)
    values: Any = scenario.resolved()
    assert values["arrivals"]["rate"] == "3/s"
    assert (scenario.phases.warmup, scenario.phases.measure) == (2.0, 20.0)
    assert scenario.limits.max_concurrency == 7
    assert values["sampling"]["top_p"] == 0.9
    assert scenario.traffic()["default"].steps()[0].requests.mean_lengths == (16.0, 5.0)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30.0), ("0.5", 0.5), ("2m", 120.0), ("1h30m", 5400.0)]
)
def test_durations_of_flags_are_seconds(text, seconds):
    assert parse.read_duration_s("--budget", text) == seconds


@pytest.mark.parametrize("text", ["95%", "95", "0.95", "95.0"])
def test_a_confidence_is_per_cent_or_a_share(text):
    assert parse.read_confidence(text) == 0.95


@pytest.mark.faults
@pytest.mark.parametrize("text", ["30", "50", "0.5", "1", "100", "0.3", "high", "-95"])
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
    ("settings", "flags", "flag"),
    [
        (["slo=[ttft < 1s]"], {}, "--set: slo.0: 'ttft < 1s'"),
        ([], {"slo": ["ttft < 1s"]}, "--slo: slo.0: 'ttft < 1s'"),
        (["arrivals={kind: poisson, rate: 8}"], {}, "--set: arrivals.rate: a rate needs its unit"),
    ],
)
def test_a_flag_that_replaces_a_block_answers_for_what_is_inside(file, settings, flags, flag):
    with pytest.raises(ScenarioError) as caught:
        load_scenario(file, settings, flags=flags)
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


def loop(scenario):
    """(users, seconds of the pause) of a closed loop."""
    return scenario.arrivals.users, scenario.arrivals.think.duration


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"users": 32, "think": "2"}, (32, 2.0)),
        ({"users": 32}, (32, 0.0)),
        ({"concurrency": 5}, (5, 0.0)),
    ],
)
def test_users_and_concurrency_are_closed_loops(file, flags, expected):
    traffic = TrafficFlags(**flags)
    alone = TrafficFlags(**flags, **LENGTHS, duration="5")
    assert loop(parse.choose_scenario(ScenarioFlags(scenario=file), traffic)) == expected
    assert loop(parse.choose_scenario(ScenarioFlags(), alone)) == expected


def test_users_of_a_closed_loop_keep_their_pause_unless_it_is_given():
    def changed(**flags):
        name = ScenarioFlags(scenario="closed_loop_users")
        return loop(parse.choose_scenario(name, TrafficFlags(**flags)))

    before: Any = load_scenario("closed_loop_users").arrivals
    chosen = parse.choose_scenario(
        ScenarioFlags(scenario="closed_loop_users"), TrafficFlags(users=3)
    )
    assert isinstance(chosen.arrivals, Users)
    assert (chosen.arrivals.users, chosen.arrivals.think) == (3, before.think)
    assert changed(think="4s")[1] == 4.0
    assert changed(concurrency=7) == (7, 0.0)


@pytest.mark.parametrize(
    ("flags", "limit"), [({"users": 1000}, 2000), ({"users": 1500}, 3000),
                         ({"concurrency": 4000, "max_concurrency": 10}, 10)]
)  # fmt: skip
def test_the_default_limit_makes_room_for_many_users_and_a_stated_one_stays(flags, limit):
    traffic = TrafficFlags(**flags, **LENGTHS, duration="5")
    assert parse.choose_scenario(ScenarioFlags(), traffic).limits.max_concurrency == limit


@pytest.mark.parametrize(
    ("scenario", "flags", "words"),
    [
        ("quickstart", {"rate": "8", "users": 3}, "--rate and --users: use one"),
        ("quickstart", {"users": 8, "concurrency": 3}, "--users and --concurrency: use one"),
        ("quickstart", {"think": "2s"}, "add --users N"),
        ("quickstart", {"concurrency": 2, "think": "2s"}, "use --users N --think"),
        ("closed_loop_users", {"rate": "8"}, "use --users N, or --set"),
        ("quickstart", {"users": 0}, "--users: arrivals.users: must be greater"),
        ("quickstart", {"rate": "inf"}, "use --concurrency N"),
    ],
)
def test_loads_that_contradict_each_other_are_refused_with_the_remedy(scenario, flags, words):
    with pytest.raises(UsageError) as caught:
        parse.choose_scenario(ScenarioFlags(scenario=scenario), TrafficFlags(**flags))
    assert words in str(caught.value)


def test_concurrency_keeps_that_many_requests_in_flight():
    traffic = TrafficFlags(concurrency=3, input_len=64, output_len=16, duration="2")
    run = simulate(parse.choose_scenario(ScenarioFlags(), traffic), shape="8b", hardware="h200")
    rows = run.request_rows[np.isfinite(run.request_rows["sent_s"])]
    assert len(rows) > 30
    for at_s in rows["sent_s"]:
        n_in_flight = np.count_nonzero((rows["sent_s"] <= at_s) & (rows["done_s"] > at_s))
        assert n_in_flight <= 3
    middle_s = 1.0 + rows["done_s"][0] / 7
    assert np.count_nonzero((rows["sent_s"] <= middle_s) & (rows["done_s"] > middle_s)) == 3


@pytest.mark.parametrize("key", ["users", "concurrency"])
def test_a_sweep_over_concurrency_is_the_closed_loop_of_the_flag(key):
    base = Base(load_scenario("quickstart"), "sim", RunOptions())
    cells = cells_of(base, [read_axis(f"{key}=1,4")], "grid")
    assert [loop(cell.scenario) for cell in cells] == [(1, 0.0), (4, 0.0)]
    assert [cell.name for cell in cells] == [f"{key}=1", f"{key}=4"]


def test_a_default_duration_does_not_limit_the_time_for_a_number_of_requests():
    defaults = {"duration": "10s", "rate": "1/s", **LENGTHS}
    traffic = TrafficFlags(num_prompts=30)
    phases = parse.choose_scenario(ScenarioFlags(), traffic, defaults=defaults).phases
    assert (phases.requests, phases.at_most) == (30, None)
    stated = TrafficFlags(num_prompts=30, duration="20")
    phases = parse.choose_scenario(ScenarioFlags(), stated, defaults=defaults).phases
    assert (phases.requests, phases.at_most) == (30, 20.0)


def chosen(*settings, **flags):
    return parse.choose_scenario(ScenarioFlags(set_=list(settings)), TrafficFlags(**flags))


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b.jsonl").write_text('{"prompt": "one"}\n{"question": "two"}\n')
    (tmp_path / "chats.jsonl").write_text('{"prompt": "one", "output_tokens": 3}\n')
    (tmp_path / "log.csv").write_text("time,prompt_tokens,completion_tokens\n0,5,6\n9,7,8\n")


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("chats.jsonl", {"kind": "dataset", "path": "chats.jsonl"}),
        ("chats.jsonl:prompt", {"kind": "dataset", "path": "chats.jsonl", "format": "prompt"}),
        ("chats.jsonl:openai-batch", {"kind": "dataset", "format": "openai_batch"}),
        ("chats.jsonl:sharegpt", {"kind": "sharegpt", "path": "chats.jsonl"}),
        ("a:b.jsonl", {"kind": "dataset", "path": "a:b.jsonl"}),
        ("a:b.jsonl:prompt", {"kind": "dataset", "path": "a:b.jsonl", "format": "prompt"}),
    ],
)
def test_a_dataset_is_a_flag(files, value, prompts):
    scenario = chosen(dataset=value, rate="5", duration="2", output_len=9)
    assert prompts.items() <= scenario.resolved()["prompts"].items()
    assert scenario.resolved()["requests"]["output_tokens"] == {"kind": "fixed", "tokens": 9}


def test_a_dataset_with_lengths_needs_no_others(files):
    rows = make_plan(chosen(dataset="chats.jsonl", concurrency=2, num_prompts=4)).schedule
    assert set(rows["output_tokens"].tolist()) == {3}
    by_set = chosen("prompts={kind: dataset, path: chats.jsonl}", rate="5", num_prompts=4)
    assert by_set.prompts.path == "chats.jsonl"


def test_a_trace_is_a_flag_and_is_replayed_as_a_whole(files):
    whole = chosen(trace="log.csv")
    rows = make_plan(whole).schedule
    assert rows["scheduled_s"].tolist() == [0.0, 9.0]
    assert rows["input_tokens"].tolist() == [5, 7]
    assert whole.phases.measure == 18.0  # the mean gap of 9 s follows the last
    assert make_plan(chosen(trace="log.csv", rate="1")).schedule["scheduled_s"].tolist() == [0, 1]
    two = chosen(trace="log.csv", num_prompts=2, output_len=64)
    assert make_plan(two).schedule["output_tokens"].tolist() == [64, 64]
    assert chosen(trace="log.csv", warmup="5").phases.measure == 13.0
    assert chosen(trace="log.csv", duration="10").phases.measure == 10.0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"dataset": "chats.jsonl:sharegtp"}, "did you mean 'sharegpt'?"),
        ({"trace": "log.csv:azur"}, "--trace log.csv:azur: unknown format 'azur'; did you mean"),
        ({"dataset": "chats.jsonl", "input_len": 5}, "--input-len: the prompts of --dataset have"),
        ({"trace": "log.csv", "users": 5}, "--users does not; remove one"),
        ({"trace": "log.csv", "warmup": "18"}, "--warmup: 18 s are not shorter than the trace"),
        ({"dataset": "none.jsonl:prompt"}, "none.jsonl:prompt: no such file"),
        ({"trace": "none.csv"}, "none.csv: no such file"),
    ],
)
def test_a_wrong_file_flag_is_one_line(files, flags, words):
    others = {} if "trace" in flags else {"rate": "5", "num_prompts": 3}
    with pytest.raises(SlobenchError) as caught:
        make_plan(chosen(**{"output_len": 4, **others, **flags}))
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_certificate_of_the_command_line_is_that_of_the_target(tmp_path):
    file = tmp_path / "our ca.pem"
    file.write_text("-----BEGIN CERTIFICATE-----")
    settings = parse.target_settings(file)
    assert load_target("https://gw.example", {}, settings).ca_cert == file
    assert parse.target_settings(None) == []
    with pytest.raises(UsageError, match=r"--ca-cert .*no\.pem: no such file"):
        parse.target_settings(tmp_path / "no.pem")
