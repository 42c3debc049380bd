"""The scenario format as a JSON schema, for editors: every key, every registered kind.

The pydantic models give most of it. This module adds that quantities are strings with units, and
that the field of a registry is one of its kinds or a shorthand. Editors complete and underline by
this schema; `slobench validate` checks more (keys that exclude each other, files that must exist).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import core_schema

from loadgen.cli.kinds import registry_of
from loadgen.errors import UsageError
from loadgen.manifest.json_section import JsonObject
from loadgen.registry import Registry
from loadgen.units import parse_duration_s, parse_level_per_s, parse_rate_per_s, parse_share
from loadgen.workload.presets import PRESETS
from loadgen.workload.scenario import Scenario

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCENARIO_FAMILIES = ("arrivals", "lengths", "durations", "popularities", "prompts", "traces")
_ELSEWHERE = "https://slobench.invalid/"  # pydantic drops local references of others
_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_UNITS = "(?:ns|us|µs|ms|s|m|min|h|d)"
_RATE = rf"^\s*{_NUMBER}\s*(?:req|requests|tok|tokens)?\s*/\s*{_UNITS}\s*$"
QUANTITIES: Mapping[Callable[[object], float], JsonSchemaValue] = {
    parse_duration_s: {
        "type": "string",
        "pattern": rf"^\s*(?:{_NUMBER}\s*{_UNITS}\s*)+$",
        "examples": ["500ms", "5m"],
    },
    parse_rate_per_s: {"type": "string", "pattern": _RATE, "examples": ["12/s", "30/min"]},
    parse_level_per_s: {"type": "string", "pattern": _RATE, "examples": ["12/s", "0/s"]},
    parse_share: {
        "anyOf": [
            {"type": "number", "minimum": 0, "maximum": 1},
            {"type": "string", "pattern": rf"^\s*{_NUMBER}\s*%?\s*$"},
        ],
        "examples": ["2%", 0.02],
    },
}
_PROBES: tuple[tuple[object, JsonSchemaValue], ...] = (
    (7, {"type": "integer", "minimum": 1}),
    ("7s", QUANTITIES[parse_duration_s]),
)


def scenario_schema() -> JsonObject:
    """The JSON schema of a scenario file, with every registered kind, plug-ins included."""
    whole = _of_model(Scenario)
    definitions = whole.pop("$defs", {})
    for family in SCENARIO_FAMILIES:
        definitions[family] = _family(family, definitions)
    definitions["SloPreset"]["properties"]["preset"]["enum"] = sorted(PRESETS)
    properties = whole["properties"]
    properties["stop_when"] = {"anyOf": [properties["stop_when"], {"const": "never"}]}
    properties["name"]["description"] = "Names the run's folder; the file's name without this key."
    whole["required"] = [name for name in whole.get("required", []) if name != "name"]
    return {
        "$schema": DIALECT,
        "title": "slobench scenario",
        **whole,
        "$defs": dict(sorted(definitions.items())),
    }


def _family(family: str, definitions: JsonObject) -> JsonSchemaValue:
    """Any of a registry's kinds, or a shorthand for `{kind: …}`."""
    registry = registry_of(family)
    kinds = [_kind(registry, name, f"{family}.", definitions) for name in registry.names()]
    return {"anyOf": [*_shorthands(registry), *kinds]}


def _kind(
    registry: Registry[Any], name: str, prefix: str, definitions: JsonObject
) -> JsonSchemaValue:
    cls = registry.get(name)
    schema = _of_model(cls, prefix)  # two families may have a block of the same name
    definitions.update({f"{prefix}{block}": d for block, d in schema.pop("$defs", {}).items()})
    kind = {"const": name, "description": " ".join((cls.__doc__ or "").split("\n\n")[0].split())}
    properties = {"kind": kind, **schema.get("properties", {})}
    # the prompts block may omit its kind, which is then synthetic
    required = [] if (registry.noun, name) == ("source of prompts", "synthetic") else ["kind"]
    return {
        "type": "object",
        "title": name,
        "properties": properties,
        "required": [*required, *schema.get("required", [])],
        "additionalProperties": False,
    }


def _shorthands(registry: Registry[Any]) -> list[JsonSchemaValue]:
    """Values that a registry takes instead of a mapping, found by trying them."""
    values = [schema for value, schema in _PROBES if _is_built(registry, value)]
    names = [name for name in registry.names() if _is_built(registry, name)]
    return [*values, *([{"enum": names}] if names else [])]


def _is_built(registry: Registry[Any], value: object) -> bool:
    try:
        registry.build(value)
    except (UsageError, ValueError, ValidationError):
        return False
    return True


def _of_model(model: type[BaseModel], prefix: str = "") -> JsonObject:
    template = f"#/$defs/{prefix}{{model}}"
    return model.model_json_schema(schema_generator=_Generator, ref_template=template)


class _Generator(GenerateJsonSchema):
    """pydantic's generator, with our quantities and registries."""

    def function_before_schema(
        self, schema: core_schema.BeforeValidatorFunctionSchema
    ) -> JsonSchemaValue:
        function: Any = schema["function"]["function"]
        if function in QUANTITIES:
            return dict(QUANTITIES[function])
        return super().function_before_schema(schema)

    def function_plain_schema(
        self, schema: core_schema.PlainValidatorFunctionSchema
    ) -> JsonSchemaValue:
        """A registry's field is built by a method of the registry."""
        registry = getattr(schema["function"]["function"], "__self__", None)
        for family in SCENARIO_FAMILIES:
            if registry is registry_of(family):
                return {"$ref": f"{_ELSEWHERE}{family}"}
        return super().function_plain_schema(schema)

    def is_instance_schema(self, schema: core_schema.IsInstanceSchema) -> JsonSchemaValue:
        return {"type": "object"}  # built by a validator, which checks its keys

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Omits the default, which is a Python value; docs/scenarios.md has it as YAML."""
        return self.generate_inner(schema["schema"])

    def generate(
        self, schema: core_schema.CoreSchema, mode: JsonSchemaMode = "validation"
    ) -> JsonSchemaValue:
        whole: JsonSchemaValue = _local(super().generate(schema, mode))
        return whole


def _local(node: Any) -> Any:
    """The schema with references to families as in the finished file, and without bounds on
    quantities, which are strings in a file."""
    if isinstance(node, dict):
        return {
            key: value.replace(_ELSEWHERE, "#/$defs/") if key == "$ref" else _local(value)
            for key, value in node.items()
            if not (key in ("gt", "ge", "lt", "le") and isinstance(value, int | float))
        }
    return [_local(item) for item in node] if isinstance(node, list) else node
