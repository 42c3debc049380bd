"""Canaries: answers under load against the answers to the same prompts at idle."""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.manifest.sections import Manifest
from loadgen.measure.statistics.proportions import chance_of_more
from loadgen.measure.wording import format_count

_WRONG = {
    "early": "begin with other words",
    "shorter": "end early",
    "repeating": "end in a loop",
    "empty": "are empty",
}
"""Kinds of answers that rounding in larger batches does not explain, and their words."""
_CHANCE = 1e-3


def canary_counts(manifest: Manifest) -> tuple[int, int]:
    """(canaries under load with the answer that they had at idle, canaries under load)."""
    found = manifest.canary
    return (0, 0) if found is None else (found.loaded.get("same", 0), _n(found.loaded))


def canary_text(manifest: Manifest) -> str:
    """`40 of 40 as at idle (repeats at idle: 31 of 32)`; "" without canaries."""
    found = manifest.canary
    n_same, n = canary_counts(manifest)
    if found is None or not n:
        return ""
    floor = f"{format_count(found.idle.get('same', 0))} of {format_count(_n(found.idle))}"
    return f"{format_count(n_same)} of {format_count(n)} as at idle (repeats at idle: {floor})"


def wrong_answers(manifest: Manifest) -> str:
    """The reason why the answers under load cannot be those of the server at idle; "" without one:
    wrong kinds are more frequent than among repeats at idle, by more than chance (0.1 %)."""
    found = manifest.canary
    if found is None:
        return ""
    n, n_idle = _n(found.loaded), _n(found.idle)
    wrong, wrong_idle = _wrong(found.loaded), _wrong(found.idle)
    if not wrong or chance_of_more(wrong, n, wrong_idle, n_idle) >= _CHANCE:
        return ""
    kinds = ", ".join(
        f"{format_count(found.loaded[kind])} {words}"
        for kind, words in _WRONG.items()
        if found.loaded.get(kind)
    )
    text = (
        f"{format_count(wrong)} of {format_count(n)} canaries were answered otherwise under load "
        f"than at idle ({kinds}); of the repeats at idle {format_count(wrong_idle)} of "
        f"{format_count(n_idle)}. "
    )
    if found.at_idle or found.under_load:
        text += f"At idle: '{found.at_idle}'; under load: '{found.under_load}'. "
    return f"{text}Check which model, replica and settings answered."


def _wrong(kinds: Mapping[str, int]) -> int:
    return sum(kinds.get(kind, 0) for kind in _WRONG)


def _n(kinds: Mapping[str, int]) -> int:
    return sum(kinds.values())
