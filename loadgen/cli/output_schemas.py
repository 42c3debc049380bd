"""The JSON schema of what a verb prints with `--json`, from the type of its result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import msgspec

from loadgen.errors import UsageError, nearest
from loadgen.manifest.json_section import JsonObject

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SUMMARY = "loadgen.measure.summary:Summary"
TYPES: Mapping[str, str] = MappingProxyType(
    {
        "run": _SUMMARY,
        "simulate": _SUMMARY,
        "report": _SUMMARY,
        "rescore": _SUMMARY,
        "import": _SUMMARY,
        "judge": _SUMMARY,
        "compare": "loadgen.studies.compare.numbers:Comparison",
        "nightly": "loadgen.studies.nightly.result:NightResult",
        "alarms": "loadgen.studies.nightly.alarms:JudgedAlarms",
        "capacity": "loadgen.studies.capacity.result:Answer",
        "size": "loadgen.studies.size.result:Size",
        "sweep": "loadgen.studies.sweep.result:SweepResult",
        "modes": "loadgen.studies.modes.result:ModesFile",
        "calibrate": "loadgen.studies.calibrate.calibration_file:Calibration",
        "solve": "loadgen.studies.solve.result:Solved",
        "tune": "loadgen.studies.tune.result:TuneFile",
        "claims": "loadgen.studies.claims.result:ClaimsFile",
        "demo": "loadgen.studies.demo.result:Demo",
        "doctor": "loadgen.studies.doctor.result:Checkup",
        "verify": "loadgen.archive.verify:Verified",
        "from": "loadgen.translate.command_line:Translation",
    }
)
"""Verb → the type of its result. The other verbs print what a file or the command line holds."""
_ALSO: Mapping[str, str] = MappingProxyType({"judge": "loadgen.foreign.locust:JudgedSummary"})
"""Verb → the type of further items of its list."""
_LISTS = frozenset({"judge", "verify"})
_ONE_OR_SEVERAL = frozenset({"report", "rescore", "import"})
"""The verbs that print an object for one run, and a list for several."""


def output_schema(verb: str) -> JsonObject:
    """The JSON schema of a verb's `--json`. Numbers may be null: undefined or infinite. Keys may be
    added, and none is removed or renamed within a major version. Raises UsageError for a verb
    without a schema."""
    if verb not in TYPES:
        raise UsageError(f"no schema of '{verb}'; {nearest(verb, TYPES)}")
    types = [_type(TYPES[verb]), *([_type(_ALSO[verb])] if verb in _ALSO else [])]
    bodies, found = msgspec.json.schema_components(
        types, schema_hook=lambda _: {"type": "number"}, ref_template="#/$defs/{name}"
    )
    definitions = _with_flat_slos(_nullable(found))
    body = bodies[0] if len(bodies) == 1 else {"anyOf": list(bodies)}
    several = {"type": "array", "items": body}
    if verb in _LISTS:
        body = several
    elif verb in _ONE_OR_SEVERAL:
        body = {"anyOf": [body, several]}
    return {"$schema": DIALECT, "title": f"slobench {verb} --json", **body, "$defs": definitions}


def _type(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _with_flat_slos(definitions: JsonObject) -> JsonObject:
    """The definitions with the result of an SLO as summary.json has it: beside the parts of its
    SLO (`loadgen.measure.summary`)."""
    if "SloResult" not in definitions:
        return definitions
    result = definitions["SloResult"]
    properties = {
        **definitions["Slo"]["properties"],
        **result["properties"],
        "bound": {},
        "certainty": {"type": ["string", "null"]},
    }
    del properties["slo"], properties["comparison"]
    required = [name for name in result["required"] if name != "slo"]
    flat = {**result, "properties": properties, "required": required}
    return {**definitions, "SloResult": flat}


def _nullable(node: Any) -> Any:
    """The schema with null beside every number that is not an integer, and without defaults that
    are not JSON."""
    if isinstance(node, list):
        return [_nullable(value) for value in node]
    if not isinstance(node, dict):
        return node
    changed = {
        key: _nullable(value)
        for key, value in node.items()
        if not (key == "default" and isinstance(value, float) and not math.isfinite(value))
    }
    return changed | {"type": ["number", "null"]} if node.get("type") == "number" else changed
