"""The next probe as far as the time that is left allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loadgen.measure.capacity.capacity_probe import Probe
from loadgen.measure.capacity.next_probe import NextProbe, Question, judge

_FAIR_SHARE = 0.25  # of what is left of the budget, for a probe before the answer is bracketed
_LEAST_HURRIED = 0.1  # of the asked window: one of some twenty requests says something
_LEAST_PROBE = 0.5  # of the asked window; what the budget leaves below that is not begun


def within(
    question: Question, probes: Sequence[Probe], ask: NextProbe, left_s: float
) -> NextProbe | None:
    """What of the asked probe fits into `left_s`; None where too little of it would."""
    if ask.warmup_s + ask.measure_s <= _FAIR_SHARE * left_s:
        return ask
    if question.is_fixed:
        return ask if ask.warmup_s + ask.measure_s <= left_s else None
    if judge(question, probes).posterior is None:
        return _hurried(question, ask, left_s)
    measure_s = min(ask.measure_s, left_s - ask.warmup_s)
    return None if measure_s < _LEAST_PROBE * ask.measure_s else replace(ask, measure_s=measure_s)


def _hurried(question: Question, ask: NextProbe, left_s: float) -> NextProbe | None:
    """Before both sides of the answer are known, no probe takes much of the time that is left:
    a rough answer is worth more than half of a precise one."""
    least_s = max(question.measure_s, _LEAST_HURRIED * ask.measure_s)
    measure_s = min(ask.measure_s, max(_FAIR_SHARE * left_s - ask.warmup_s, least_s))
    warmup_s = max(question.warmup_s, min(ask.warmup_s, left_s - measure_s))
    if warmup_s + measure_s > left_s:
        return None
    return replace(ask, warmup_s=warmup_s, measure_s=measure_s)
