"""docs/scenarios.md says what the code does: every key, every kind, and an example that loads."""

import re
from pathlib import Path

import pytest

from loadgen.errors import ScenarioError
from loadgen.workload.arrivals import ARRIVALS
from loadgen.workload.classes import Step, TrafficClass
from loadgen.workload.durations import DURATIONS
from loadgen.workload.lengths import LENGTHS
from loadgen.workload.requests import POPULARITIES
from loadgen.workload.scenario import (
    Scenario,
    load_scenario,
    scenario_from_flags,
    shipped_scenarios,
)
from loadgen.workload.texts import PROMPTS
from loadgen.yaml_document import parse_document

PAGE = (Path(__file__).parent.parent.parent / "docs" / "scenarios.md").read_text("utf-8")
ROWS = {line.split("|")[1].strip(): line for line in PAGE.splitlines() if line.startswith("|")}


def leaves(block, path=()):
    """(dotted key, value) of everything but the parameters of kinds, which have tables of their
    own."""
    for key, value in block.items():
        if isinstance(value, dict) and ("kind" not in value or key == "prompts"):
            yield from leaves(value, (*path, key))
        else:
            yield ".".join((*path, key)), value


def every_key():
    scenario = scenario_from_flags(
        rate="1/s",
        input_len=1,
        output_len=1,
        duration="1s",
        overrides=["requests.shared_prefix.tokens=1", "session={turns: 2}"],
    )
    return dict(leaves(scenario.resolved()))


def test_every_key_of_a_scenario_has_a_row():
    keys = every_key()
    assert len(keys) >= 24
    assert [key for key in keys if f"`{key}`" not in ROWS] == []


@pytest.mark.parametrize(
    "key",
    [
        *("phases.warmup", "phases.drain", "limits.max_concurrency", "limits.when_full"),
        *("stop_when.error_rate", "stop_when.over", "prompts.salt", "requests.temperature"),
        *("session.context", "requests.correlation", "requests.shared_prefix.hit_rate"),
        *("instrument.loop_lag", "instrument.read_backlog"),
        *("instrument.cpu", "instrument.run_delay"),
    ],
)
def test_a_stated_default_is_the_default(key):
    stated = ROWS[f"`{key}`"].split("|")[-3].strip()
    value = every_key()[key]
    assert stated in {str(value), f"{value:g}" if isinstance(value, float) else value}


@pytest.mark.parametrize(
    ("registry", "chapter"),
    [
        (ARRIVALS, "Arrivals"),
        (LENGTHS, "Lengths"),
        (DURATIONS, "Pauses"),
        (PROMPTS, "Prompts"),
        (POPULARITIES, "Prompts"),
    ],
    ids=["arrivals", "lengths", "pauses", "prompts", "popularities"],
)
def test_every_kind_and_its_parameters_have_a_row(registry, chapter):
    text = PAGE.split(f"\n## {chapter}\n")[1].split("\n## ")[0]
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    for cls in registry:
        keys = [field.alias or name for name, field in cls.model_fields.items()]
        # a | inside a cell is written \|, which ends no cell
        cell = rows[f"`{cls.kind}`"].replace("\\|", "/").split("|")[2]
        assert [key for key in keys if f"`{key}`" not in cell] == []


@pytest.mark.parametrize(
    ("chapter", "build"),
    [
        ("Arrivals", lambda block: ARRIVALS.build(block["arrivals"])),
        (
            "Lengths",
            lambda block: [
                LENGTHS.build(v) for v in block["requests"].values() if isinstance(v, dict)
            ],
        ),
        ("Classes", lambda block: whole(block).classes),
        ("Sessions and chains", lambda block: whole(block).chain),
    ],
)
def test_the_example_of_a_chapter_can_be_built(chapter, build):
    text = PAGE.split(f"\n## {chapter}\n")[1].split("\n## ")[0]
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    document = parse_document(example, "example", ScenarioError)
    document.raise_mistakes()
    assert build(document.values)


def whole(block):
    """The scenario that a part of one stands for."""
    rest = {"arrivals": {"kind": "poisson", "rate": "1/s"}, "phases": {"measure": "1m"}}
    return Scenario.model_validate({"name": "example", **rest, **block})


def test_every_key_of_classes_and_steps_has_a_row():
    cells = " ".join(ROWS)
    assert [key for key in TrafficClass.model_fields if f"`{key}`" not in cells] == []
    assert [key for key in Step.model_fields if f"`chain.{key}`" not in cells] == []


def test_the_example_loads(tmp_path):
    path = tmp_path / "example.yaml"
    path.write_text(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
    assert load_scenario(path).name == "chat_bursty"


def test_the_shipped_scenarios_are_named():
    assert all(f"`{name}`" in PAGE for name in shipped_scenarios())
