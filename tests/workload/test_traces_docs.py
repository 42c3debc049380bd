"""docs/traces.md and the code agree: every format, every key, and examples that load."""

import re
from pathlib import Path

import yaml

from loadgen.workload.scenario import Scenario, load_scenario
from loadgen.workload.trace_arrivals import TraceArrivals
from loadgen.workload.traces.trace import TRACES

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = (DOCS / "traces.md").read_text("utf-8")
SCENARIOS = (DOCS / "scenarios.md").read_text("utf-8")
ROWS = [line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("| `")]


def test_every_format_and_every_key_of_a_replay_has_a_row():
    assert set(TRACES.names()) - {"auto"} <= {row.strip("`") for row in ROWS}
    keys = set(TraceArrivals.model_fields) - {"path", "format"}
    assert keys <= {row.strip("`") for row in ROWS}


def test_every_key_of_every_format_is_named():
    missing = [
        f"{kind}: {field.alias or name}"
        for kind in TRACES.names()
        for name, field in TRACES.get(kind).model_fields.items()
        if not re.search(rf"\b{field.alias or name}\b", PAGE)
    ]
    assert not missing, "\n".join(missing)


def test_the_examples_load():
    examples = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) >= 3
    for example in examples:
        values = {"phases": {"measure": "1s"}, **yaml.safe_load(example), "name": "example"}
        scenario = Scenario.model_validate(values)
        assert scenario.arrivals is not None, example
        assert scenario.arrivals.kind == "trace", example


def test_the_example_with_a_preset_is_that_presets(tmp_path):
    (block,) = [b for b in re.findall(r"```yaml\n(.*?)```", SCENARIOS, re.DOTALL) if "preset:" in b]
    scenario = load_scenario("quickstart", yaml.safe_load(block))
    assert scenario.slo_texts() == ("p99(tpot) <= 30ms", "p99(ttft) <= 400ms")
    assert "# p99(ttft) <= 500ms, p99(tpot) <= 30ms" in block
