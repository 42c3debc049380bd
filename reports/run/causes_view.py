"""The page's section on causes: each figure with the sentence that says what it shows."""

from __future__ import annotations

from dataclasses import dataclass

from loadgen.measure.drivers import Drivers
from loadgen.measure.per_request import PerRequest
from loadgen.measure.statistics.robust_line import FittedLine
from loadgen.measure.summary import Summary
from loadgen.measure.wording import format_count, format_value
from loadgen.records import Run
from reports.charts import Spec
from reports.run.causes_charts import PARTS, by_position, scatter, split_bars
from reports.run.causes_frames import WhyFrames, why_frames


@dataclass(frozen=True, slots=True)
class CauseFigure:
    """One figure: the name it is drawn under, its caption and the sentence below."""

    name: str
    caption: str
    sentence: str
    spec: Spec


def whys(run: Run, summary: Summary, columns: PerRequest) -> list[CauseFigure]:
    """What there is to say; nothing where no request ended well."""
    found, seen = summary.drivers, why_frames(run, columns)
    if found is None or not seen.ttft:
        return []
    level = f"{100 * summary.confidence:g} %"
    return [
        *_split(found),
        CauseFigure(
            "why-ttft",
            "TTFT from send by prompt length",
            _grows("TTFT", found.ttft_by_input, 1000, "1 000 prompt tokens", level),
            scatter(seen.ttft, found.ttft_by_input, "prompt tokens", "TTFT by prompt length"),
        ),
        *_company(found, seen, level),
        *_positions(seen),
    ]


def _split(found: Drivers) -> list[CauseFigure]:
    if not found.split:
        return []
    groups = list(found.split.items())
    (_, whole), (slowest, worst) = groups[0], groups[-1]
    grown = {
        title: (getattr(worst, part) or 0.0) - (getattr(whole, part) or 0.0)
        for part, (title, _) in PARTS.items()
    }
    most = max(grown, key=lambda title: grown[title])
    sentence = "Means per request, from the planned instant to the last token."
    if len(groups) > 1 and grown[most] > 0:
        sentence += (
            f" The {slowest} took {format_value(sum(grown.values()), 's')} more than the mean "
            "request;"
            f" the part that grew most is {most}, by {format_value(grown[most], 's')}."
        )
    if whole.server_queue_s is None:
        sentence += (
            " This server does not tell how long requests waited in it: that is inside"
            f" “{PARTS['prefill_s'][0]}”."
        )
    return [CauseFigure("why-split", "Where the time went", sentence, split_bars(found.split))]


def _company(found: Drivers, seen: WhyFrames, level: str) -> list[CauseFigure]:
    if not seen.tpot:
        return []
    line = found.tpot_by_in_flight
    return [
        CauseFigure(
            "why-tpot",
            "TPOT by requests in flight",
            _grows("TPOT", line, 1, "request in flight", level),
            scatter(seen.tpot, line, "requests in flight while decoding", "TPOT by company"),
        )
    ]


def _positions(seen: WhyFrames) -> list[CauseFigure]:
    if not seen.itl:
        return []
    first, last = seen.itl[0], seen.itl[-1]
    sentence = (
        f"The median gap before the second chunk is {format_value(first['p50'], 's')}, and"
        f" {format_value(last['p50'], 's')} late in long answers: it grows with the context a "
        "token looks"
        " back on."
        if last["p50"] > 1.1 * first["p50"]
        else "The gaps do not grow along an answer."
    )
    return [CauseFigure("why-itl", "Gaps along an answer", sentence, by_position(seen.itl))]


def _grows(what: str, line: FittedLine | None, times: int, per: str, level: str) -> str:
    if line is None:
        return "Too few requests, or all alike, for a line through them."
    slope, low, high = (end * times for end in (line.slope, line.low, line.high))
    told = (
        f"{format_value(abs(slope), 's')} per {per} ({level} interval {_signed(low)} to "
        f"{_signed(high)}"
    )
    told += f", rank correlation {line.rank_correlation:.2f}, n = {format_count(line.n)})."
    if low <= 0 <= high:
        return f"{what} does not clearly go with this: {told}"
    return f"{what} {'grows' if slope > 0 else 'falls'} by {told}"


def _signed(seconds: float) -> str:
    return ("−" if seconds < 0 else "") + format_value(abs(seconds), "s")
