"""`doctor --target`: a server examined from where the load would come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from loadgen.run.target import Choice, finish, open_server
from loadgen.workload.prompts import Prompts
from loadgen.workload.texts import Synthetic
from targets.endpoint import Endpoint
from targets.extended_preflight import extended_preflight
from targets.preflight import preflight
from targets.preflight_checks import CONSEQUENCES, EXTENDED_CHECKS
from targets.preflight_result import Preflight, PreflightCheck

_LONGEST = (512, 128)  # prompt and output tokens, for the check of the model's length
_TIMEOUT_S = 30.0


def examine_target(
    choice: Choice, salt: bytes, log_dir: Path, console: Console
) -> tuple[str, list[PreflightCheck], str | None]:
    """(what was examined, every check, why it cannot be measured at all or None). `salt` makes the
    prompts new to the server, so that a cache can be told from a first time.

    Raises UsageError for a target that cannot be meant.
    """
    with open_server(choice, log_dir, console) as server:
        found, examined = finish(_asked(server.endpoint, choice.model, salt))
        checks = [_for_a_doctor(check, found.max_model_len) for check in found.checks]
        if found.fatal is not None:
            skipped = [PreflightCheck(name, None, "not checked") for name in EXTENDED_CHECKS]
            return server.endpoint.url, [*checks, *skipped], found.fatal
        return server.endpoint.url, [*checks, *examined], None


async def _asked(
    endpoint: Endpoint, model: str, salt: bytes
) -> tuple[Preflight, tuple[PreflightCheck, ...]]:
    def text_of(n_chars: int, number: int) -> str:
        return Prompts(Synthetic(), 0, salt + number.to_bytes(4, "little")).sample(n_chars)

    found = await preflight(
        endpoint,
        endpoint.adapter(**({"model": model} if model else {})),
        max_input_tokens=_LONGEST[0],
        max_output_tokens=_LONGEST[1],
        timeout_s=_TIMEOUT_S,
        text_of=lambda n_chars: text_of(n_chars, 0),
    )
    if found.fatal is not None:
        return found, ()
    return found, await extended_preflight(endpoint, found, text_of, _TIMEOUT_S)


def _for_a_doctor(check: PreflightCheck, max_model_len: int | None) -> PreflightCheck:
    """A check with its consequence; there is no scenario yet whose lengths could be too long."""
    if check.check == "max_model_len" and check.detail != "not checked":
        stated = f"{max_model_len} tokens" if max_model_len else "not stated"
        check = replace(check, detail=stated)
    if check.ok or check.detail == "not checked":
        return check
    return replace(check, consequence=CONSEQUENCES[check.check])
