"""docs/traces.md says what the code does: every format, every key, and examples that load."""

import re
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("kind", TRACES.names())
def test_every_key_of_a_format_is_named(kind):
    fields = TRACES.get(kind).model_fields
    assert all(re.search(rf"\b{field.alias or name}\b", PAGE) for name, field in fields.items())


@pytest.mark.parametrize("example", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_the_examples_load(example, tmp_path):
    values = {"phases": {"measure": "1s"}, **yaml.safe_load(example), "name": "example"}
    scenario = Scenario.model_validate(values)
    assert scenario.arrivals is not None
    assert scenario.arrivals.kind == "trace"


def test_the_example_with_a_preset_is_that_presets(tmp_path):
    (block,) = [b for b in re.findall(r"```yaml\n(.*?)```", SCENARIOS, re.DOTALL) if "preset:" in b]
    scenario = load_scenario("quickstart", yaml.safe_load(block))
    assert scenario.slo_texts() == ("p99(tpot) <= 30ms", "p99(ttft) <= 400ms")
    assert "# p99(ttft) <= 500ms, p99(tpot) <= 30ms" in block
