"""SLO expressions: `ttft <= 500ms` is a limit for each request, `p99(ttft) <= 500ms` is a limit for
the run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from loadgen.errors import nearest
from loadgen.measure.catalog import BY_SLO_WORD, METRICS, NEEDS_STREAM, OUTPUT_SPEED, Metric
from loadgen.units import parse_duration_s, parse_rate_per_s, parse_share

_SHAPE = re.compile(
    r"\s*(?P<left>[^<>=≤≥]+?)\s*(?P<op><=|>=|≤|≥|[<>=]+)\s*(?P<limit>[^<>=≤≥]*?)\s*"
)
_CALL = re.compile(r"(?P<function>[\w.]+)\s*\(\s*(?P<word>[^()]*?)\s*\)")
_PERCENTILE = re.compile(r"p(?P<percent>\d+(?:\.\d+)?)")
_AGGREGATE_FIRST = re.compile(r"(?P<function>p\d+(?:\.\d+)?|mean|max)[\s_.-]+(?P<word>\w+)")
_AGGREGATE_LAST = re.compile(r"(?P<word>\w+?)[\s_.-]+(?P<function>p\d+(?:\.\d+)?|mean|max)")
_OPERATORS = {"<=": "<=", "≤": "<=", ">=": ">=", "≥": ">="}
_NEAREST_OPERATOR = {"<": "<=", "=<": "<=", ">": ">=", "=>": ">="}
_BETTER = {"lower": "<=", "higher": ">="}
_PER_REQUEST_WORD = {"itl": "max_itl", "icl": "max_stall"}
_SYNONYMS = {
    "throughput": "'requests_per_s' or 'output_tokens_per_s'",
    "latency": "'e2e'",
    "avg": "'mean'",
    "average": "'mean'",
    "median": "'p50'",
    "errors": "'error_rate'",
}
_OF_MET_REQUESTS = ("attainment", "goodput", "goodput_output_tokens_per_s")
_SHARES = ("attainment", "goodput", "tree_attainment")
IMPLIED_ATTAINMENT = "attainment >= 99%"
_LATENESS_S = 5e-3
_LATENESS_SHARE_OF_TTFT = 0.02
_EXAMPLES = "'ttft <= 500ms', 'p99(ttft) <= 500ms', 'attainment >= 99%'"


@dataclass(frozen=True, slots=True)
class Slo:
    """An SLO. `metric` is a catalogue name, `limit` in its unit (seconds, per second, share).

    `scope` request: `metric` of each request; tree: `metric` of each tree of an agent; run:
    `aggregate` ("p99", "mean", "max") of `metric`, or, where `aggregate` is None, the run's own
    `metric`. `quantile` is set for percentiles only.
    `comparison` is the operator with the limit as written, "" for a limit that nobody wrote.
    """

    text: str
    scope: Literal["request", "tree", "run"]
    metric: str
    operator: Literal["<=", ">="]
    limit: float
    aggregate: str | None = None
    quantile: float | None = None
    comparison: str = ""

    @property
    def is_about_trees(self) -> bool:
        """Whether only a run of agents can meet it."""
        return self.scope == "tree" or self.metric == "tree_attainment"

    def holds(self, value: float) -> bool:
        """Whether a value meets the SLO; NaN does not."""
        return value <= self.limit if self.operator == "<=" else value >= self.limit


def parse_slo(text: str) -> Slo:
    """The SLO that an expression states.

    Raises ValueError with the mistake and the nearest correct expression: an unknown metric or
    aggregate, a limit without its unit, a limit in the wrong direction, a metric that has no single
    value per request.
    """
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an SLO; write e.g. {_EXAMPLES}")
    operator = _OPERATORS.get(match["op"])
    if operator is None:
        nearest = _NEAREST_OPERATOR.get(match["op"])
        written = f"'{match['left']} {nearest} {match['limit']}'" if nearest else "'<=' or '>='"
        raise ValueError(f"{text!r}: '{match['op']}' is not allowed in an SLO; write {written}")
    aggregate, quantile, word = _left_side(match["left"], text)
    if word == OUTPUT_SPEED:
        return _of_output_speed(text, aggregate, operator, match["limit"])
    metric = _metric(word, text)
    _check_scope(metric, aggregate, text)
    if operator != _BETTER[metric.direction]:
        better = _BETTER[metric.direction]
        raise ValueError(
            f"{text!r}: {metric.direction} is better for '{word}';"
            f" write '{match['left']} {better} …'"
        )
    return Slo(
        text=text.strip(),
        scope=_scope(metric, aggregate),
        metric=metric.name,
        operator=">=" if operator == ">=" else "<=",
        limit=_limit(metric, match["limit"], text),
        aggregate=aggregate,
        quantile=quantile,
        comparison=text[match.end("left") :].rstrip(),
    )


def _scope(metric: Metric, aggregate: str | None) -> Literal["request", "tree", "run"]:
    if aggregate is not None or metric.scope == "gap":
        return "run"
    return metric.scope


def _of_output_speed(text: str, aggregate: str | None, operator: str, limit: str) -> Slo:
    """`output_speed >= 30/s` as the limit of the TPOT, of which it is the inverse."""
    if aggregate is not None:
        raise ValueError(
            f"{text!r}: '{OUTPUT_SPEED}' is a limit of each request; write '{OUTPUT_SPEED} >= …',"
            " or a percentile of its inverse: 'p90(tpot) <= 33ms'"
        )
    if operator != ">=":
        raise ValueError(
            f"{text!r}: higher is better for '{OUTPUT_SPEED}'; write '{OUTPUT_SPEED} >= …'"
        )
    try:
        tpot_s = 1 / parse_rate_per_s(_bare_number(limit))
    except ValueError as problem:
        raise ValueError(f"{text!r}: {problem}") from None
    comparison = f" <= {1e3 * tpot_s:.10g}ms"
    return Slo(text.strip(), "request", "tpot_s", "<=", tpot_s, comparison=comparison)


def with_allowed_operator(text: str) -> str:
    """An expression with `<` written as `<=` and `>` as `>=`; any other text as it is."""
    match = _SHAPE.fullmatch(text)
    if match is None or match["op"] not in _NEAREST_OPERATOR:
        return text
    return f"{match['left']} {_NEAREST_OPERATOR[match['op']]} {match['limit']}"


def parse_measure(text: str) -> tuple[Metric, str | None, float | None]:
    """The number of a run that the left side of an SLO names: metric, aggregate, quantile.

    Raises ValueError as `parse_slo` does, and for a metric of each request without an aggregate.
    """
    aggregate, quantile, word = _left_side(text.strip(), text)
    metric = _metric(word, text)
    if metric.scope != "run" and aggregate is None:
        of = "tree" if metric.scope == "tree" else "request"
        raise ValueError(
            f"{text!r}: '{word}' has a value per {of}; write 'p50({word})', 'p99({word})' or "
            f"'mean({word})'"
        )
    if metric.scope != "tree":
        _check_scope(metric, aggregate, text)
    return metric, aggregate, quantile


def own_slo(metric: str) -> Slo:
    """The SLO that each request meets the limit of a metric that it brought itself, if any."""
    text = f"{METRICS[metric].slo} <= the request's own"
    return Slo(text, scope="request", metric=metric, operator="<=", limit=math.inf)


def for_each_request(slo: Slo) -> str:
    """The expression that puts the limit of an aggregate on each request: `ttft <= 1s` for
    `p99(ttft) <= 1s`."""
    return f"{METRICS[slo.metric].slo}{slo.comparison}"


def slos_of_request(slos: Sequence[Slo], own_s: Mapping[str, float]) -> list[Slo]:
    """The SLOs of a request: its own limit of a metric (`own_s`, seconds, 0 is none) replaces the
    limit for all requests."""
    own = {metric: limit_s for metric, limit_s in own_s.items() if limit_s > 0}
    common = [slo for slo in slos if slo.scope == "request" and slo.metric not in own]
    return common + [replace(own_slo(m), limit=limit_s) for m, limit_s in own.items()]


def with_implied(slos: Sequence[Slo]) -> list[tuple[Slo, bool]]:
    """The SLOs, each with whether it is implied.

    Per-request SLOs need a share of requests that must meet them. If no SLO states it
    (attainment, goodput or attainment(tree)), attainment >= 99 % is implied, and shown as such.
    """
    stated = [(slo, False) for slo in slos]
    has_per_request = any(slo.scope == "request" for slo in slos)
    states_share = any(slo.metric in _SHARES for slo in slos)
    return stated + [(parse_slo(IMPLIED_ATTAINMENT), True)] * (has_per_request and not states_share)


def from_goodput(pairs: Iterable[str]) -> list[str]:
    """vLLM's `--goodput ttft:500 tpot:50` (milliseconds) as per-request SLOs.

    Raises ValueError for any other text.
    """
    words = {"ttft": "ttft_from_send", "tpot": "tpot", "e2el": "e2e_from_send"}
    slos = []
    for pair in (word for text in pairs for word in text.split()):
        name, _, limit = pair.partition(":")
        if name not in words:
            raise ValueError(f"{pair!r}: {nearest(name, words)}")
        try:
            limit_ms = float(limit)
        except ValueError:
            raise ValueError(f"{pair!r}: expected milliseconds, e.g. 'ttft:500'") from None
        if not 0 < limit_ms < float("inf"):
            raise ValueError(f"{pair!r}: expected a limit above 0 ms")
        slos.append(f"{words[name]} <= {limit_ms:g}ms")
    return slos


def ungrounded(slos: Iterable[Slo], elsewhere: Iterable[Slo] = ()) -> str | None:
    """An error message for SLOs that count requests meeting per-request SLOs when there are none;
    None where all is well. Per-request SLOs `elsewhere` (of classes) count, too."""
    stated = list(slos)
    if any(slo.scope == "request" for slo in (*stated, *elsewhere)):
        return None
    for slo in stated:
        if slo.metric in _OF_MET_REQUESTS:
            return (
                f"'{slo.text}' counts requests that meet every per-request SLO, and there "
                "is none; add one, e.g. 'ttft <= 500ms'"
            )
    return None


def mistaken_trees(slos: Iterable[Slo], has_agents: bool) -> str | None:
    """An error message for SLOs about trees where there are no agents, or that state no share of
    trees, or no limit; None where all is well. `slos` are all of a scenario."""
    stated = list(slos)
    about_trees = [slo for slo in stated if slo.is_about_trees]
    if not about_trees:
        return None
    text = about_trees[0].text
    if not has_agents:
        return f"'{text}' is about trees of requests, which only agents have"
    if not any(slo.metric == "tree_attainment" for slo in stated):
        return f"'{text}' needs the share of trees that must meet it; add 'attainment(tree) >= 95%'"
    if not any(slo.scope in ("request", "tree") for slo in stated):
        return f"'{text}' counts trees that meet every limit, and there is none; add 'ttft <= 15s'"
    return None


def needs_stream(slos: Iterable[Slo]) -> str | None:
    """An error message for SLOs on metrics that answers without a stream do not have; None where
    all have."""
    for slo in slos:
        if slo.metric in NEEDS_STREAM:
            return (
                f"'{slo.text}': answers that are not streamed (stream: false) have no "
                f"{METRICS[slo.metric].title}, because they come as a whole; limit 'e2e' instead"
            )
    return None


def lateness_limit_s(slos: Iterable[Slo]) -> float:
    """The p99 dispatch lateness above which a run is invalid, in seconds: max(5 ms, 2 % of the
    tightest TTFT limit).

    Every TTFT limit counts, per request or of the run, by either clock: lateness adds to `ttft`,
    and it changes the traffic for which `ttft_from_send` was stated.
    """
    limits_s = [slo.limit for slo in slos if slo.metric in ("ttft_s", "ttft_from_send_s")]
    return max(_LATENESS_S, _LATENESS_SHARE_OF_TTFT * min(limits_s, default=0.0))


def _left_side(left: str, text: str) -> tuple[str | None, float | None, str]:
    call = _CALL.fullmatch(left)
    if call is None:
        return None, None, left
    if (whole := f"{call['function']}({call['word']})") in BY_SLO_WORD:
        return None, None, whole
    function, word = call["function"], call["word"]
    if function in ("mean", "max"):
        return function, None, word
    percentile = _PERCENTILE.fullmatch(function)
    if percentile is None:
        raise ValueError(
            f"{text!r}: unknown aggregate '{function}'; "
            + _nearest(function, ("mean", "max", "p50", "p90", "p99", "p99.9"))
        )
    quantile = float(percentile["percent"] + "e-2")  # 99.9 / 100 is not 0.999
    if not 0 < quantile < 1:
        raise ValueError(f"{text!r}: a percentile lies between p0 and p100, both excluded")
    return function, quantile, word


def _metric(word: str, text: str) -> Metric:
    if word in BY_SLO_WORD:
        return BY_SLO_WORD[word]
    if word in METRICS:
        metric = METRICS[word]
        hint = (
            f"write '{metric.slo}'"
            if metric.slo
            else "it describes the load generator, so it cannot have an SLO"
        )
        raise ValueError(f"{text!r}: '{word}' is a column; {hint}")
    known = (*BY_SLO_WORD, OUTPUT_SPEED)
    raise ValueError(f"{text!r}: unknown metric '{word}'; {_nearest(word, known)}")


def _check_scope(metric: Metric, aggregate: str | None, text: str) -> None:
    word = metric.slo
    if metric.scope == "tree" and aggregate is not None:
        raise ValueError(
            f"{text!r}: '{word}' is a limit of each tree; write '{word} <= …' and the share of"
            " trees: 'attainment(tree) >= 90%'"
        )
    if metric.scope == "run" and aggregate is not None:
        raise ValueError(
            f"{text!r}: '{word}' is one number of the run;"
            f" write '{word} {_BETTER[metric.direction]} …'"
        )
    if metric.scope == "gap" and aggregate is None:
        raise ValueError(
            f"{text!r}: '{word}' has many values per request; write"
            f" '{_PER_REQUEST_WORD[word]} <= …' for the worst of each request,"
            f" or 'p99({word}) <= …' for the run"
        )


def _nearest(word: str, known: Iterable[str]) -> str:
    choices = list(known)
    meant = _SYNONYMS.get(word.lower()) or _with_brackets(word.lower(), choices)
    if meant is None and word.lower() in choices:
        meant = f"'{word.lower()}'"
    return f"did you mean {meant}?" if meant else nearest(word, choices)


def _with_brackets(word: str, known: Collection[str]) -> str | None:
    """`p99(ttft)` for `p99 ttft` and `ttft_p99`."""
    for shape in (_AGGREGATE_FIRST, _AGGREGATE_LAST):
        match = shape.fullmatch(word)
        if match is not None and match["word"] in known:
            return f"'{match['function']}({match['word']})'"
    return None


def _limit(metric: Metric, limit: str, text: str) -> float:
    parse: Callable[[object], float] = {
        "s": parse_duration_s,
        "per_s": parse_rate_per_s,
        "share": parse_share,
    }[metric.unit]
    try:
        return parse(_bare_number(limit) if metric.unit != "share" else limit)
    except ValueError as problem:
        raise ValueError(f"{text!r}: {problem}") from None


def _bare_number(limit: str) -> object:
    """A number where the text is nothing else, so that loadgen.units rejects it with its own
    message."""
    try:
        value = float(limit)
    except ValueError:
        return limit
    return int(value) if value.is_integer() else value
