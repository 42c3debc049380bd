"""What every page of ours has in common: templates, embedded data, and nothing from anywhere else.

A page is one file that needs nothing but a browser. Its scripts are its own and named by their
hash, so whatever a run or a scenario may contain, it cannot become code.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import jinja2


def environment() -> jinja2.Environment:
    """Templates of this package; every value is escaped, and one that is missing is an error."""
    loader = jinja2.FunctionLoader(lambda name: asset(f"templates/{name}"))
    return jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def asset(name: str) -> str:
    """The text of a file of this package."""
    return files("reports").joinpath(name).read_text(encoding="utf-8")


def policy(scripts: Sequence[str]) -> str:
    """The content security policy: only these scripts, by their hash; styles inline; nothing from
    anywhere else."""
    hashes = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline';"
        " img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def embedded(content: Mapping[str, Any]) -> str:
    """JSON for a `<script type="application/json">`, unable to end it or to open a comment."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
