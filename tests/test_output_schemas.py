"""The JSON schemas of --json, against what the verbs print."""

import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # no stubs installed

from loadgen.cli.lazy_verbs import VERBS
from loadgen.cli.output_schemas import TYPES, output_schema
from loadgen.errors import UsageError
from tests.foreign.results import vllm
from tests.foreign.test_judge_locust import FILE as LOCUST
from tests.studies.test_alarms import week
from tests.test_verbs import slobench as command_line

PAGE = Path(__file__).parent.parent / "docs" / "scripts-and-agents.md"
LOAD = ["--rate=10/s", "--input-len=200", "--output-len=24", "--warmup=0s", "--duration=4s"]
SIM = ["--target=sim", *LOAD]
PRINTED = {
    "run": ["run", *SIM, "--slo=p90(ttft)<=1s", "--slo=ttft<=1s", "--out=again"],
    "simulate": ["simulate", *LOAD, "--out=simulated"],
    "report": ["report", "first", "second"],
    "rescore": ["rescore", "first", "--definition=all"],
    "import": ["import", "theirs.json", "--out=imported"],
    "judge": ["judge", "theirs.json", "lo_stats.csv", "--slo=p50(e2e)<=1s"],
    "compare": ["compare", "first", "second"],
    "alarms": ["alarms", "nights"],
    "verify": ["verify", "first", "second"],
    "capacity": ["capacity", *SIM, "--slo=ttft<=100s", "--between=1/s:2/s"],
    "sweep": ["sweep", *SIM, "--over=engine.mode=chunked", "--repeats=1", "--out=swept"],
    "solve": ["solve", *LOAD, "--hardware=h200", "--load=50%", "--seeds=0", "--out=solved"],
    "tune": ["tune", *LOAD, "--slo=ttft<=1s", "--modes=chunked", "--seeds=1"],
    "claims": ["claims", "--only=static-padding", "--only=continuous-23x", "--seeds=1"],
    "from": ["from", "vllm bench serve --request-rate 8 --num-prompts 80"],
}


@pytest.fixture
def cli(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *words: command_line(capsys, monkeypatch, *words)


@pytest.fixture
def recorded(cli, tmp_path):
    """Two simulated runs, a result of vLLM and a week of nights."""
    for name, seed in (("first", 1), ("second", 2)):
        code, _, err = cli("run", *SIM, f"--seed={seed}", f"--out={name}")
        assert code == 0, err
    (tmp_path / "theirs.json").write_text(json.dumps(vllm()))
    (tmp_path / "lo_stats.csv").write_text(LOCUST)
    week(tmp_path / "nights", 120, 120.2, 119.8)


def errors(verb, content):
    found = Draft202012Validator(output_schema(verb)).iter_errors(content)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


def test_what_a_verb_prints_is_valid(cli, recorded):
    for verb, words in PRINTED.items():
        code, out, err = cli(*words, "--json")
        assert code in (0, 1, 3), err
        assert errors(verb, json.loads(out)) == [], verb


def test_a_missing_key_and_a_text_in_place_of_a_number_are_not_valid(cli):
    _, out, _ = cli(*PRINTED["simulate"], "--json")
    content = json.loads(out)
    assert errors("simulate", {key: content[key] for key in content if key != "verdict"}) == [
        ": 'verdict' is a required property"
    ]
    content["metrics"]["ttft_s"]["mean"] = "fast"
    assert errors("simulate", content) == [
        "metrics/ttft_s/mean: 'fast' is not of type 'number', 'null'"
    ]


@pytest.mark.parametrize("verb", TYPES)
def test_a_schema_is_a_schema_and_its_verb_has_json(verb, cli):
    code, out, _ = cli("list", "--schema", verb)
    schema = json.loads(out)
    Draft202012Validator.check_schema(schema)
    assert (code, schema["title"]) == (0, f"slobench {verb} --json")
    assert verb in VERBS
    assert "--json" in cli(verb, "--help")[1]


def test_a_verb_without_a_schema_is_named():
    with pytest.raises(UsageError, match="no schema of 'capasity'; did you mean 'capacity'"):
        output_schema("capasity")


def test_the_page_lists_every_verb_with_json_and_whether_it_has_a_schema(cli):
    rows = re.findall(r"^\| (`.*?) \| .* \| (yes|no) \|$", PAGE.read_text(), re.MULTILINE)
    documented = {verb: word for cell, word in rows for verb in re.findall(r"`([\w]+)`", cell)}
    assert documented == {
        verb: "yes" if verb in TYPES else "no"
        for verb in VERBS
        if "--json" in cli(verb, "--help")[1]
    }
