"""Explanations of the words on pages, each with the page of the docs that says more."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from markupsafe import Markup, escape

from loadgen.measure.catalog import METRICS


@dataclass(frozen=True, slots=True)
class Word:
    """A word with its explanation. `formula` is that of a metric, "" for other words; `docs` is a
    page in docs/ with the anchor of a section."""

    key: str
    title: str
    text: str
    docs: str
    formula: str = ""


class Terms:
    """The words of a page that were explained so far (`used`), in order of appearance."""

    def __init__(self) -> None:
        self.used: dict[str, Word] = {}

    def term(self, text: str) -> Markup:
        """The text, with a button that opens its explanation if there is one."""
        return escape(text) + self.help(text)

    def help(self, text: str) -> Markup:
        """The button alone, which page.css draws as a question mark; "" without an explanation."""
        word = explained(text)
        if word is None:
            return Markup()
        self.used[word.key] = word
        return Markup(
            '<button type="button" class="help" popovertarget="word-{}"'
            ' aria-label="What is {}?"></button>'
        ).format(word.key, word.title)


def explained(text: str) -> Word | None:
    """The explanation of a column, a tile or a verdict, also of a percentile of a metric (`p99
    TTFT`, `TTFT p99`, `p99(ttft)`); None for a word that needs none."""
    word = text.strip(" †").lower()
    if word.startswith("("):
        word = word[1:-1]  # a measure that does not count
    if word.startswith("with ") and word.endswith(" % confidence"):
        word = "bound"
    elif word.startswith("two-sided "):
        word = "confidence interval"
    elif _PERCENTILE.fullmatch(word):
        word = "percentile"
    else:
        word = _OF_METRIC.sub("", word)
        word = word if "(" in word else word.removesuffix(")")
    return WORDS.get(_SAME.get(word, word))


_PERCENTILE = re.compile(r"p[\d.]+")
_OF_METRIC = re.compile(r"^(p[\d.]+|mean|max)[ (](?!itl$|stall$)| p[\d.]+$")
_SAME = {
    "slo met": "attainment",
    "slo attainment": "attainment",
    "output tokens": "output throughput",
    "tokens/s": "output throughput",
    "vectors": "result throughput",
    "scores": "result throughput",
    "tokens/s per gpu": "output throughput",
    "failed": "error rate",
    "error_rate": "error rate",
    "longest gap": "max stall",
    "interval": "confidence interval",
    "mean requested": "requested",
    "median ttft from send": "ttft from send",
}
_SURE = "metrics.md#how-sure-a-number-is"
_VERDICT = "metrics.md#verdict"
_SLOS = "scenarios.md#slos"
_TEXTS = (
    (
        "SLO",
        _SLOS,
        "A limit that the service must meet: per request (ttft <= 500ms) or of the run (p99(ttft) "
        "<= 500ms).",
    ),
    (
        "Measured",
        _VERDICT,
        "The value in this run. For a limit per request: the share of the due requests that met "
        "it.",
    ),
    (
        "Bound",
        _SURE,
        "A one-sided confidence bound: with this confidence the true value lies above (at least) "
        "or below it (at most). An SLO is proven by its bound.",
    ),
    (
        "n",
        _SURE,
        "The number of values behind a number. Requests that wait in the same queue are late "
        "together, so they can be worth fewer independent ones.",
    ),
    (
        "Verdict",
        _VERDICT,
        "Whether the SLO holds in this run. In comparisons: better, worse or the same within the "
        "margin, or inconclusive.",
    ),
    (
        "Proven",
        "metrics.md#how-certain-a-result-is",
        "Yes: the confidence bound lies on the same side of the limit as the measured value. "
        "Clear of the limit: only a kind of slowness that is absent from the run could change the "
        "verdict.",
    ),
    ("MET", _VERDICT, "Every SLO holds in this run."),
    ("MISSED", _VERDICT, "At least one SLO does not hold in this run."),
    (
        "INVALID: NO VERDICT",
        "reading-a-report.md#why-is-my-run-invalid",
        "The load generator, not the server, may have caused the result, so there is no verdict.",
    ),
    ("NO VERDICT", _VERDICT, "The run has too few requests for its SLOs, or none was stated."),
    ("INCONCLUSIVE", _VERDICT, "The run is too short to be certain at the required confidence."),
    (
        "Certainty",
        "metrics.md#how-certain-a-result-is",
        "How sure the verdict is: proven, clear of the limit, in this run only, or too close to "
        "tell.",
    ),
    (
        "Due",
        "metrics.md#which-requests-count",
        "Requests whose scheduled send time lies in the measured window. All of them count, "
        "whenever they ended.",
    ),
    (
        "Offered",
        "metrics.md#rates",
        "Requests per second of the schedule that was drawn; the requested rate is its mean.",
    ),
    (
        "Requested",
        "metrics.md#rates",
        "The mean that the scenario states; the draw differs from it by chance.",
    ),
    (
        "Achieved rate",
        "metrics.md#rates",
        "Requests sent per second of the measured window. Requested: the mean of the scenario; "
        "offered: the schedule drawn from it.",
    ),
    (
        "Percentile",
        _SURE,
        "p99: 99 % of the values are at or below it. * fewer than ten independent samples lie "
        "beyond it.",
    ),
    (
        "Confidence interval",
        _SURE,
        "The range that contains the true value with the stated probability.",
    ),
    ("Class", "scenarios.md#classes", "A kind of traffic with its own share, lengths and SLOs."),
    ("Tenant", "metrics.md#tenants-and-fairness", "A customer whose classes are counted together."),
    (
        "Served share",
        "metrics.md#tenants-and-fairness",
        "Tokens of successful requests as a share of the tokens that were requested.",
    ),
    (
        "Gap cv",
        "scenarios.md#arrivals",
        "Standard deviation of the gaps between arrivals divided by their mean: 0 for equal gaps, "
        "1 for Poisson arrivals, above 1 for bursts.",
    ),
    (
        "Lag-1 correlation of gaps",
        "scenarios.md#arrivals",
        "Correlation between neighbouring gaps: above 0 where busy stretches last.",
    ),
    (
        "Dispersion of counts",
        "scenarios.md#arrivals",
        "Variance of the number of arrivals in equal windows divided by its mean: 1 for Poisson "
        "arrivals, more for bursts.",
    ),
    ("Probe", "capacity.md#words-in-the-output", "A short run of a capacity search at one load."),
    ("Load", "capacity.md#what-is-scaled", "The rate or the number of users of a probe."),
    ("Window", "capacity.md#how-it-searches", "The measured part of a probe, after its warm-up."),
    (
        "Result",
        "capacity.md#words-in-the-output",
        "measured: in full length. fine, saturated: it stopped early because the outcome was "
        "clear. untrusted: the load generator was the limit.",
    ),
    (
        "Capacity",
        "capacity.md#how-it-searches",
        "The highest load that meets the SLO, with its confidence interval. Promise its lower end.",
    ),
    (
        "Change",
        "compare.md#how-the-verdict-is-found",
        "B against A (tonight against the baseline), in per cent; of shares in percentage points.",
    ),
    (
        "p (Holm)",
        "compare.md#how-the-verdict-is-found",
        "The probability of such a difference between equal sides, corrected for the number of "
        "measures that decide (Holm).",
    ),
    (
        "Runs needed",
        "compare.md#how-many-runs",
        "Runs per side that detect a change of this size in 9 of 10 comparisons.",
    ),
    (
        "Pareto front",
        "sweep.md#how-to-read-it",
        "Cells that no other cell beats in one of latency and throughput without being worse in "
        "the other.",
    ),
    (
        "Mode",
        "engine-lab.md#batching-modes-side-by-side",
        "A batching policy of the bundled engine with its settings.",
    ),
    (
        "Seeds",
        "engine-lab.md#capacity-of-each-mode",
        "The number of schedules, each drawn from its own seed, behind a number.",
    ),
    (
        "Best / mode",
        "engine-lab.md#capacity-of-each-mode",
        "The best mode's capacity divided by that of this mode.",
    ),
)
WORDS: Mapping[str, Word] = MappingProxyType(
    {
        title.lower(): Word(re.sub(r"\W+", "-", title.lower()).strip("-"), title, text, docs)
        for title, docs, text in _TEXTS
    }
    | {
        name: Word(
            metric.name.replace("_", "-"),
            metric.title,
            f"{metric.meaning} {metric.edges}",
            "metrics.md#the-metrics",
            metric.formula,
        )
        for metric in METRICS.values()
        for name in {metric.title.lower(), metric.slo} - {""}
    }
)
