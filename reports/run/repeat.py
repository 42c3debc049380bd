"""A command that sends the like of one request again: to see with one's own eyes how it fails."""

from __future__ import annotations

import json
import shlex

from loadgen.manifest.manifest import TargetSection
from reports.redaction import redact

_PATHS = {"chat": "/chat/completions", "completions": "/completions"}
_PROMPT = "PROMPT-OF-THE-SAME-LENGTH"


def curl(target: TargetSection, input_tokens: int, output_tokens: int) -> str:
    """The request as curl would send it to a manifest's `target`, with a prompt of about as many
    tokens (the page holds no prompts) and keys from the environment or redacted; "" where the
    target is no HTTP API that is known here."""
    url, path = target.url, _PATHS.get(target.api or "")
    if path is None or not url.startswith(("http://", "https://")):
        return ""
    base = url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    prompt: dict[str, object] = {"prompt": _PROMPT}
    if target.api == "chat":
        prompt = {"messages": [{"role": "user", "content": _PROMPT}]}
    body = json.dumps(
        {
            "model": target.model,
            "max_tokens": output_tokens,
            "stream": True,
            **(target.extra_body or {}),
            **prompt,
        }
    )
    before, _, after = redact(body).rpartition(_PROMPT)
    words = f"yes hello | head -n {max(1, input_tokens)} | tr '\\n' ' '"
    said = f"printf %s {shlex.quote(before)}; {words}; printf %s {shlex.quote(after)}"
    key = target.api_key_env or ""
    headers = [
        "-H 'content-type: application/json'",
        *([f'-H "authorization: Bearer ${key}"'] if key.isidentifier() else []),
        *(f"-H {shlex.quote(f'{name}: [redacted]')}" for name in target.headers or ()),
    ]
    to = f"{shlex.quote(redact(base + path))} {' '.join(headers)}"
    # By a pipe: one argument of a command may hold 128 KiB, a long prompt is longer.
    return f"{{ {said}; }} | curl -sSN {to} --data-binary @-"
