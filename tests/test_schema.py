"""The JSON schema takes what slobench takes and refuses what it refuses, as far as a schema can."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings

from loadgen.cli.kinds import FAMILIES, describe
from loadgen.cli.schema import SCENARIO_FAMILIES, scenario_schema
from loadgen.workload.scenario import load_scenario, shipped_scenarios
from tests import strategies

ROOT = Path(__file__).parent.parent
BAD = ROOT / "tests" / "golden" / "bad_scenarios"
SCHEMA = scenario_schema()
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}


def mistakes(value, schema, path=""):
    """What a JSON-schema validator would say: the keywords that our schema uses, and no others."""
    known = {"$ref", "anyOf", "type", "const", "enum", "properties", "required", "items"}
    known |= {"additionalProperties", "pattern", "minimum", "maximum", "prefixItems", "$defs"}
    known |= {"exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems", "minLength"}
    known |= {"title", "description", "examples", "$schema", "maxLength"}
    assert not set(schema) - known, f"{path}: unknown keywords {set(schema) - known}"
    if "$ref" in schema:
        return mistakes(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], path)
    if "anyOf" in schema:
        found = [mistakes(value, option, path) for option in schema["anyOf"]]
        return [] if any(not f for f in found) else [f"{path}: no option fits {value!r}"]
    is_bool = isinstance(value, bool)
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (is_bool and kind != "boolean")):
        return [f"{path}: {value!r} is no {kind}"]
    if "const" in schema and value != schema["const"]:
        return [f"{path}: {value!r} is not {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{path}: {value!r} is none of {schema['enum']}"]
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            return [f"{path}: {value!r} does not match"]
        return [] if len(value) >= schema.get("minLength", 0) else [f"{path}: is too short"]
    if isinstance(value, dict):
        return list(_in_mapping(value, schema, path))
    if isinstance(value, list):
        own = schema.get("prefixItems")
        parts = own or [schema.get("items", {})] * len(value)
        size = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        found = [
            m
            for k, (v, s) in enumerate(zip(value, parts, strict=False))
            for m in mistakes(v, s, f"{path}.{k}")
        ]
        return found if size else [f"{path}: has {len(value)} entries"]
    if isinstance(value, int | float) and not is_bool:
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        fits = low <= value <= high and (above is None or value > above)
        return [] if fits and (below is None or value < below) else [f"{path}: {value} is outside"]
    return []


def _in_mapping(value, schema, path):
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name in schema.get("required", []):
        if name not in value:
            yield f"{path}.{name}: is missing"
    for name, inner in value.items():
        if name in properties:
            yield from mistakes(inner, properties[name], f"{path}.{name}")
        elif others is False:
            yield f"{path}.{name}: is unknown"
        elif isinstance(others, dict):
            yield from mistakes(inner, others, f"{path}.{name}")


def test_the_schema_is_json_and_every_reference_is_in_it():
    text = json.dumps(SCHEMA, allow_nan=False)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    references = set(re.findall(r'"\$ref": "([^"]*)"', text))
    assert {ref.removeprefix("#/$defs/") for ref in references} <= set(SCHEMA["$defs"])
    assert all(ref.startswith("#/$defs/") for ref in references)


@pytest.mark.parametrize("family", SCENARIO_FAMILIES)
def test_every_registered_kind_is_in_it_with_its_keys(family):
    options = {
        o["title"]: o["properties"] for o in SCHEMA["$defs"][family]["anyOf"] if "title" in o
    }
    described = {entry["kind"]: set(entry["parameters"]) for entry in describe(family)}
    assert {kind: set(keys) - {"kind"} for kind, keys in options.items()} == described


@pytest.mark.parametrize("name", shipped_scenarios())
def test_every_shipped_scenario_conforms(name):
    text = (ROOT / "scenarios" / f"{name}.yaml").read_text()
    values = yaml.load(text, Loader=yaml.BaseLoader)
    assert mistakes(_typed(values), SCHEMA) == []


def _typed(value):
    """YAML 1.2's plain numbers, truths and nothing; other words stay words (`on`, `off`)."""
    if isinstance(value, dict):
        return {key: _typed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_typed(inner) for inner in value]
    words = {"true": True, "false": False, "null": None}
    if value in words:
        return words[value]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


@given(strategies.scenario_mappings)
@settings(max_examples=40)
def test_what_loads_conforms(values):
    assert mistakes(values, SCHEMA) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"stop_when": "never"},
        {"slo": [{"preset": "chat"}, "ttft <= 1s"]},
        {"arrivals": {"kind": "sum", "of": [{"kind": "poisson", "rate": "1/s"}]}},
        {"arrivals": {"kind": "trace", "path": "x.csv", "format": "azure", "thin": 0.5}},
        {"arrivals": {"kind": "trace", "path": "x.csv", "window": {"from": "1h"}}},
        {"prompts": {"salt": "none"}},
        {"prompts": {"kind": "dataset", "path": "x.jsonl"}},
        {"requests.output_tokens": 5},
    ],
)
def test_shorthands_and_special_words_conform(settings):
    values = yaml.safe_load((ROOT / "scenarios" / "quickstart.yaml").read_text())
    for dotted, value in settings.items():
        *path, last = dotted.split(".")
        block = values
        for part in path:
            block = block[part]
        block[last] = value
    load_scenario("quickstart", settings)
    assert mistakes(values, SCHEMA) == []


@pytest.mark.parametrize(
    "name",
    [
        *(
            "bare_duration",
            "bare_rate",
            "unknown_arrivals",
            "unknown_key_top",
            "unknown_key_nested",
        ),
        *("missing_kind", "missing_parameter", "zero_tokens", "fractional_tokens", "quoted_number"),
        *("slo_not_a_list", "stop_when_word", "temperature_too_high", "unknown_key_in_kind"),
        *("future_schema", "boolean_count", "unknown_length_kind", "rate_of_unknown_unit"),
    ],
)
def test_editors_underline_these_mistakes(name):
    values = yaml.safe_load((BAD / f"{name}.yaml").read_text())
    assert mistakes(values, SCHEMA)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_listed_as_json(family):
    assert json.loads(json.dumps(describe(family)))
