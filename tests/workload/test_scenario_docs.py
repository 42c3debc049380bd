"""docs/scenarios.md and the code agree: every key, every kind, every default, and the examples."""

import re
from pathlib import Path
from typing import Any

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
        overrides=["requests.shared_prefix.tokens=1", "session={turns: 2}", "sampling={}"],
    )
    return dict(leaves(scenario.resolved()))


def test_every_key_of_a_scenario_has_a_row():
    keys = every_key()
    assert len(keys) >= 24
    assert [key for key in keys if f"`{key}`" not in ROWS] == []


def test_stated_defaults_are_the_defaults():
    defaults = every_key()
    keys = (
        *("phases.warmup", "phases.drain", "limits.max_concurrency", "limits.when_full"),
        *("stop_when.error_rate", "stop_when.over", "prompts.salt", "requests.temperature"),
        *("session.context", "requests.correlation", "requests.shared_prefix.hit_rate"),
        *("instrument.loop_lag", "instrument.read_backlog"),
        *("instrument.cpu", "instrument.run_delay"),
    )
    wrong = []
    for key in keys:
        stated, value = ROWS[f"`{key}`"].split("|")[-3].strip(), defaults[key]
        if stated not in {str(value), f"{value:g}" if isinstance(value, float) else value}:
            wrong.append(f"{key}: the page has {stated}, the code {value}")
    assert not wrong, "\n".join(wrong)


def chapter_text(chapter):
    return PAGE.split(f"\n## {chapter}\n")[1].split("\n## ")[0]


def test_every_kind_and_its_parameters_have_a_row():
    registries: dict[str, tuple[Any, ...]] = {
        "Arrivals": (ARRIVALS,),
        "Lengths": (LENGTHS,),
        "Pauses": (DURATIONS,),
        "Prompts": (PROMPTS, POPULARITIES),
    }
    missing = []
    for chapter, families in registries.items():
        lines = [line for line in chapter_text(chapter).splitlines() if line.startswith("|")]
        rows = {line.split("|")[1].strip(): line for line in lines}
        for cls in (cls for registry in families for cls in registry):
            if f"`{cls.kind}`" not in rows:
                missing.append(f"{chapter}: {cls.kind}")
                continue
            keys = [field.alias or name for name, field in cls.model_fields.items()]
            # a | inside a cell is written \\|, which ends no cell
            cell = rows[f"`{cls.kind}`"].replace("\\|", "/").split("|")[2]
            missing += [f"{chapter}: {cls.kind}: {key}" for key in keys if f"`{key}`" not in cell]
    assert not missing, "\n".join(missing)


def test_the_example_of_each_chapter_can_be_built():
    build = {
        "Arrivals": lambda block: ARRIVALS.build(block["arrivals"]),
        "Lengths": lambda block: [
            LENGTHS.build(v) for v in block["requests"].values() if isinstance(v, dict)
        ],
        "Classes": lambda block: whole(block).classes,
        "Sessions and chains": lambda block: whole(block).chain,
    }
    for chapter, build_example in build.items():
        (example,) = re.findall(r"```yaml\n(.*?)```", chapter_text(chapter), re.DOTALL)
        document = parse_document(example, f"the example of {chapter}", ScenarioError)
        document.raise_mistakes()
        assert build_example(document.values), chapter


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
