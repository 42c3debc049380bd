"""Scenarios: found by path or name, overridden, made from flags, and written back as they read."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from pydantic import ValidationError

from loadgen.errors import ScenarioError
from loadgen.workload.lengths import Fixed, Uniform
from loadgen.workload.renewal import Gamma, Poisson
from loadgen.workload.requests import SharedPrefix
from loadgen.workload.scenario import (
    Scenario,
    StopWhen,
    load_scenario,
    read_source,
    scenario_from_flags,
)
from loadgen.workload.truncated_lengths import Lognormal
from tests import strategies

CHAT = """\
# An evening in a chat service.
schema: 1
name: chat
arrivals: {kind: gamma, rate: 12/s, cv: 1.8}
requests:
  input_tokens: {kind: lognormal, median: 220, sigma: 0.9, max: 4096}
  output_tokens: 64
phases: {warmup: 30s, measure: 5m}
slo:
  - ttft <= 500ms
  - attainment >= 99%
"""


@pytest.fixture
def chat(tmp_path):
    path = tmp_path / "chat.yaml"
    path.write_text(CHAT)
    return path


def flags(**changes):
    return scenario_from_flags(
        **{"rate": "8/s", "input_len": 512, "output_len": 128, "duration": "60s", **changes}
    )


def test_a_file_becomes_seconds_rates_and_kinds(chat):
    scenario = load_scenario(chat)
    assert isinstance(scenario.arrivals, Gamma)
    assert (scenario.arrivals.rate, scenario.arrivals.cv) == (12.0, 1.8)
    assert scenario.requests is not None
    assert isinstance(scenario.requests.input_tokens, Lognormal)
    assert scenario.requests.output_tokens == Fixed(tokens=64)
    assert (scenario.phases.warmup, scenario.phases.measure) == (30.0, 300.0)
    assert scenario.horizon_s == 330.0
    assert [slo.metric for slo in scenario.slos()] == ["ttft_s", "attainment"]


def test_what_is_not_said_has_a_default(chat):
    scenario = load_scenario(chat)
    assert scenario.seed == 0
    assert scenario.phases.drain == 30.0
    assert (scenario.limits.timeout, scenario.limits.max_concurrency) == (60.0, 2000)
    assert scenario.limits.when_full == "drop"
    assert scenario.stop_when == StopWhen()
    assert (scenario.stop_when.error_rate, scenario.stop_when.over) == (0.5, 20.0)
    assert scenario.prompts.salt == "run"
    assert scenario.requests is not None
    assert scenario.requests.shared_prefix is None


@settings(max_examples=40)
@given(strategies.scenario_mappings)
def test_a_scenario_written_as_yaml_reads_back_equal(tmp_path_factory, mapping):
    scenario = Scenario.model_validate(mapping)
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    path.write_text(scenario.to_yaml(), "utf-8")
    assert load_scenario(path) == scenario
    assert Scenario.model_validate(scenario.resolved()) == scenario


def test_yaml_has_units_and_no_defaults():
    scenario = flags(
        slo=["p99(ttft) <= 500ms"], overrides=["limits.timeout=1m", "stop_when=never", "seed=0"]
    )
    assert scenario.to_yaml() == (
        "schema: 1\n"
        "name: command_line\n"
        "arrivals: {kind: poisson, rate: 8/s}\n"
        "requests:\n"
        "  input_tokens: {kind: fixed, tokens: 512}\n"
        "  output_tokens: {kind: fixed, tokens: 128}\n"
        "phases: {measure: 1m}\n"
        "stop_when: never\n"
        "slo:\n"
        "- p99(ttft) <= 500ms\n"
    )


def test_resolved_says_every_key():
    resolved = flags().resolved()
    counted = {"requests": None, "at_most": None}
    assert resolved["phases"] == {"warmup": "0s", "measure": "1m", "drain": "30s", **counted}
    assert resolved["stop_when"] == {"error_rate": "50%", "over": "20s", "saturated": None}
    assert resolved["instrument"]["run_delay"] == "1%"
    assert resolved["schema"] == 1


@pytest.mark.parametrize(
    "said", ["quickstart", "quickstart.yaml", "scenarios/quickstart", "scenarios/quickstart.yaml"]
)
def test_a_shipped_scenario_is_found_by_name_from_anywhere(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_scenario(said).name == "quickstart"
    assert read_source(said)[0] == "scenarios/quickstart.yaml"


def test_a_file_in_the_way_wins_over_a_shipped_name(chat, monkeypatch):
    monkeypatch.chdir(chat.parent)
    chat.rename(chat.parent / "quickstart.yaml")
    assert load_scenario("quickstart.yaml").name == "chat"


def test_a_missing_file_names_the_nearest_shipped_scenario():
    with pytest.raises(ScenarioError, match=r"quikstart\.yaml: no such file.*'quickstart'\?"):
        load_scenario("quikstart.yaml")


def test_a_path_that_is_no_file_is_told_plainly(tmp_path):
    with pytest.raises(ScenarioError, match="cannot be read: Is a directory"):
        load_scenario(tmp_path)


def test_a_file_without_a_name_is_called_after_its_file(tmp_path):
    path = tmp_path / "2nd try.yaml"
    path.write_text(CHAT.replace("name: chat\n", ""))
    assert load_scenario(path).name == "s2nd_try"


def test_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + CHAT.replace("\n", "\r\n").encode())
    assert load_scenario(path).name == "chat"


def test_settings_override_by_dotted_path(chat):
    scenario = load_scenario(
        chat,
        [
            "arrivals.rate=20/s",
            "requests.output_tokens={kind: uniform, min: 1, max: 9}",
            "requests.shared_prefix.tokens=100",
            "slo.0=ttft <= 1s",
            "limits.when_full=wait",
        ],
    )
    assert scenario.arrivals == Gamma.model_validate({"rate": "20/s", "cv": 1.8})
    assert scenario.requests is not None
    assert scenario.requests.output_tokens == Uniform(min=1, max=9)
    assert scenario.requests.shared_prefix == SharedPrefix(tokens=100)
    assert scenario.slo == ("ttft <= 1s", "attainment >= 99%")
    assert scenario.limits.when_full == "wait"


def test_overrides_from_python_are_a_mapping(chat):
    scenario = load_scenario(chat, {"arrivals": {"kind": "poisson", "rate": "3/s"}, "seed": 5})
    assert scenario.arrivals == Poisson.model_validate({"rate": "3/s"})
    assert scenario.seed == 5


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("arrivals.rate=20", "--set: arrivals.rate: a rate needs its unit: write '20/s', not 20"),
        ("arrivals.rat=20/s", "--set: arrivals.rat: unknown key 'rat'; did you mean 'rate'?"),
        ("arrivals.kind=posson", "--set: arrivals.kind: unknown arrival process 'posson'"),
        ("seed", "--set seed: expected key.path=value, e.g. arrivals.rate=20/s"),
        ("seed={", "--set seed={:1: while parsing"),
        ("slo.7=ttft <= 1s", "--set slo.7: slo is ['ttft <= 500ms', 'attainment >= 99%'], which"),
        ("requests.output_tokens.tokens=3", "requests.output_tokens is 64, which has no 'tokens'"),
    ],
)
def test_a_bad_setting_is_told_as_a_setting(chat, setting, said):
    with pytest.raises(ScenarioError) as caught:
        load_scenario(chat, [setting])
    assert said in str(caught.value)


def test_a_mistake_beside_a_setting_keeps_its_line(chat):
    with pytest.raises(ScenarioError, match=r"chat\.yaml:4: arrivals\.cv: unknown key 'cv'"):
        load_scenario(chat, ["arrivals.kind=poisson"])


def test_flags_make_the_scenario_that_a_file_would():
    scenario = flags(max_concurrency=16, slo=["ttft <= 1s"], seed=9, warmup="5s")
    assert scenario.arrivals == Poisson.model_validate({"rate": "8/s"})
    assert scenario.requests.input_tokens == Fixed(tokens=512)
    assert (scenario.phases.warmup, scenario.phases.measure) == (5.0, 60.0)
    assert (scenario.limits.max_concurrency, scenario.seed) == (16, 9)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rate": "8"}, "--rate: arrivals.rate: '8' is not a rate; write '8/s'"),
        ({"duration": "60"}, "--duration: phases.measure: '60' is not a duration"),
        ({"input_len": 0}, "--input-len: requests.input_tokens.tokens: must be greater"),
        ({"output_len": -5}, "--output-len: requests.output_tokens.tokens: must be greater"),
        ({"max_concurrency": 0}, "--max-concurrency: limits.max_concurrency: must be greater"),
        ({"slo": ["ttft < 5"]}, "--slo: slo.0: 'ttft < 5': '<' is not allowed in an SLO"),
        ({"seed": -1}, "--seed: seed: must be greater than or equal to 0, got -1"),
    ],
)
def test_a_bad_flag_is_told_as_that_flag(changes, said):
    with pytest.raises(ScenarioError) as caught:
        flags(**changes)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("slo", "overrides", "limit_s"),
    [
        ([], [], 0.005),
        (["ttft <= 100ms"], [], 0.005),
        (["ttft <= 2s"], [], 0.04),
        (["p99(ttft) <= 1s", "ttft <= 2s"], [], 0.02),
        (["ttft <= 2s"], ["instrument.lateness=1ms"], 0.001),
        (["tpot <= 2s"], [], 0.005),
        (["ttft_from_send <= 2s"], [], 0.04),
    ],
)
def test_the_lateness_limit_follows_the_tightest_ttft(slo, overrides, limit_s):
    assert flags(slo=slo, overrides=overrides).lateness_limit_s == pytest.approx(limit_s)


def test_a_scenario_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        flags().seed = 3


def test_a_kind_of_the_wrong_family_is_refused():
    values = flags().resolved()
    with pytest.raises(ValidationError, match="instance of Arrivals"):
        Scenario.model_validate({**values, "arrivals": Fixed(tokens=3)})


def test_deep_nesting_is_refused_not_a_crash(tmp_path):
    path = tmp_path / "deep.yaml"
    path.write_text("a: " + "[" * 5000)
    with pytest.raises(ScenarioError, match="nested too deeply"):
        load_scenario(path)


def test_importing_scenarios_loads_neither_pandas_nor_scipy():
    script = (
        "import sys, loadgen.workload.scenario, loadgen.workload.schedule\n"
        "print([m for m in ('pandas', 'scipy', 'torch', 'aiohttp') if m in sys.modules])"
    )
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.strip() == "[]"


def asked_rates(arrivals, **more):
    values = {
        "name": "asked",
        "arrivals": arrivals,
        "requests": {"input_tokens": 100, "output_tokens": 10},
        "phases": {"warmup": "10s", "measure": "30s"},
        **more,
    }
    scenario = Scenario.model_validate({k: v for k, v in values.items() if v is not None})
    return scenario.requested_rate_per_s(), scenario.requested_rates_per_s()


def test_the_requested_rate_is_the_mean_over_the_measured_window():
    assert asked_rates({"kind": "poisson", "rate": "8/s"}) == (8.0, {"default": 8.0})
    ramp = {"kind": "ramp", "from": "0/s", "to": "40/s", "over": "40s"}
    assert asked_rates(ramp)[0] == pytest.approx(25.0)  # 10/s at 10 s, 40/s at 40 s
    assert asked_rates({"kind": "burst", "requests": 90})[0] == 0.0  # all in the warm-up


def test_a_closed_loop_requests_no_rate():
    users = {"kind": "users", "users": 4, "think": "1s"}
    assert asked_rates(users) == (None, {"default": None})


def test_classes_share_the_requested_rate_by_weight():
    requests = {"input_tokens": 100, "output_tokens": 10}
    users = {"kind": "users", "users": 4, "think": "1s"}
    chat, rag = {"requests": requests, "weight": 3}, {"requests": requests, "weight": 1}
    own = {"requests": requests, "arrivals": {"kind": "poisson", "rate": "2/s"}}
    poisson = {"kind": "poisson", "rate": "8/s"}
    assert asked_rates(poisson, requests=None, classes={"chat": chat, "rag": rag, "own": own}) == (
        10.0,
        {"chat": 6.0, "rag": 2.0, "own": 2.0},
    )
    loop = {"requests": requests, "arrivals": users}
    mixed = asked_rates(poisson, requests=None, classes={"chat": chat, "loop": loop})
    assert mixed == (None, {"chat": 8.0, "loop": None})


def test_sampling_is_recorded_only_where_it_is_stated():
    plain = load_scenario("quickstart")
    assert "sampling" not in plain.resolved()
    stated = load_scenario("quickstart", ["sampling.top_p=0.9", "sampling.top_k=20"])
    assert stated.sampling is not None
    assert stated.sampling.body() == {"top_p": 0.9, "top_k": 20}
    assert stated.with_values(stated.resolved()) == stated
    assert "sampling: {top_p: 0.9, top_k: 20}" in stated.to_yaml()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("sampling.top_p=0", "sampling.top_p: must be greater than 0"),
        ("sampling.top_p=1.1", "sampling.top_p: must be less than or equal to 1"),
        ("sampling.min_p=-0.1", "sampling.min_p: must be greater than or equal to 0"),
        ("sampling.top_q=1", "did you mean 'top_p'"),
    ],
)
def test_an_impossible_sampling_parameter_is_an_error_with_its_key(setting, words):
    with pytest.raises(ScenarioError) as caught:
        load_scenario("quickstart", [setting])
    assert words in str(caught.value)
