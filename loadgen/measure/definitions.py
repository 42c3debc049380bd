"""The same recorded run under the metric definitions of other benchmark tools.

Every definition uses the successful due requests. The formulas are reproduced; data that this
client does not record (another tool's tokenizer, its own delays) is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import due_rows
from loadgen.measure.closed_loop import counting_start
from loadgen.measure.per_request import event_gaps, per_request
from loadgen.measure.statistics.intervals import Values
from loadgen.measure.statistics.percentiles import nearest_rank
from loadgen.records import Run

Percentile = Callable[[Values, float], float]
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Answers:
    """The inputs of the formulas: an entry per successful request; gaps by chunk, 0 between two of
    the same read, and between arrivals. `tpot_s` as in `PerRequest`."""

    planned_s: Values
    sent_s: Values
    first_chunk_s: Values
    first_token_s: Values
    last_token_s: Values
    finish_s: Values
    done_s: Values
    tokens: NDArray[np.int64]
    first_chunk_tokens: NDArray[np.int64]
    gap_s: Values
    gap_tokens: NDArray[np.int64]
    tpot_s: Values
    arrival_gap_s: Values
    arrival_gap_tokens: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Definition:
    """The definitions of a tool. Each formula returns the samples of a metric, NaN where it has
    none."""

    name: str
    source: str
    formulas: Mapping[str, str]
    ttft_s: Callable[[Answers], Values]
    tpot_s: Callable[[Answers], Values]
    itl_s: Callable[[Answers], Values]
    e2e_s: Callable[[Answers], Values]
    percentile: Percentile
    interpolates: str


def linear(ordered: Values, quantile: float) -> float:
    """numpy's default: interpolation between the two neighbours of (n − 1)·q."""
    return float(np.quantile(ordered, quantile))


def nearest(ordered: Values, quantile: float) -> float:
    """The sample of rank ⌈n·q⌉."""
    return float(ordered[nearest_rank(len(ordered), quantile) - 1])


def floored(ordered: Values, quantile: float) -> float:
    """sorted[⌊n·q⌋], counted from 0."""
    return float(ordered[min(len(ordered) - 1, math.floor(round(quantile * len(ordered), 9)))])


def _per(seconds: Values, counts: NDArray[np.int64]) -> Values:
    shared = np.full(len(seconds), np.nan)
    np.divide(seconds, counts, out=shared, where=counts > 0)
    return shared


def _weighted(seconds: Values, counts: NDArray[np.int64]) -> Values:
    """The seconds per token of each request, a sample for each of its tokens."""
    return np.repeat(_per(seconds, counts), np.maximum(counts, 0))


def _chunk_gaps(a: Answers) -> Values:
    """All gaps, including those after an empty first chunk and before a last chunk that holds only
    the finish reason: both count as chunks there."""
    waits_s = a.first_token_s - a.first_chunk_s
    return np.concatenate([waits_s[waits_s > 0], a.gap_s, _finite(a.finish_s - a.last_token_s)])


def _finite(values: Values) -> Values:
    return values[np.isfinite(values)]


def _last_chunk_s(a: Answers) -> Values:
    """The last token, or the finish reason in a chunk of its own."""
    return np.fmax(a.last_token_s, a.finish_s)


def _gaps_and_zeros(a: Answers) -> Values:
    """All gaps, and a gap of 0 for each further token of a chunk, the first chunk included."""
    n_further = (a.gap_tokens - 1).sum() + (a.first_chunk_tokens - 1).sum()
    return np.concatenate([a.gap_s, np.zeros(int(n_further))])


def _if_streamed(seconds: Values, a: Answers) -> Values:
    """NaN for an answer of a single token, which does not count as a stream there."""
    return np.where(a.tokens > 1, seconds, np.nan)


_VLLM = Definition(
    "vllm",
    "vllm bench serve, endpoint_request_func.py",
    {
        "ttft": "first chunk with choices (an empty role chunk counts) − sent",
        "tpot": "(E2E − TTFT) / (n − 1), n > 1",
        "itl": "one sample per chunk with choices after the first, role and finish chunk counted",
        "e2e": "last chunk with choices − sent",
    },
    ttft_s=lambda a: a.first_chunk_s - a.sent_s,
    tpot_s=lambda a: _per(_last_chunk_s(a) - a.first_chunk_s, a.tokens - 1),
    itl_s=_chunk_gaps,
    e2e_s=lambda a: _last_chunk_s(a) - a.sent_s,
    percentile=linear,
    interpolates="linear",
)
_GUIDELLM = Definition(
    "guidellm",
    "guidellm 0.8.1, request_stats.py and statistics.py",
    {
        "ttft": "first token − sent",
        "tpot": "(last token − sent) / n, with TTFT in it, n samples per request",
        "itl": "(last token − first token) / (n − 1), n − 1 samples per request",
        "e2e": "end of the stream − sent",
    },
    ttft_s=lambda a: a.first_token_s - a.sent_s,
    tpot_s=lambda a: _weighted(a.last_token_s - a.sent_s, a.tokens),
    itl_s=lambda a: _weighted(a.last_token_s - a.first_token_s, a.tokens - 1),
    e2e_s=lambda a: a.done_s - a.sent_s,
    percentile=nearest,
    interpolates="nearest rank",
)
_AIPERF = Definition(
    "aiperf",
    "aiperf 0.13.0",
    {
        "ttft": "first token − sent",
        "tpot": "(E2E − TTFT) / (n − n_first_chunk); n − 1 where that is unknown",
        "itl": "the same, one sample per request",
        "e2e": "last token − sent",
    },
    ttft_s=lambda a: a.first_token_s - a.sent_s,
    tpot_s=lambda a: _per(a.last_token_s - a.first_token_s, a.tokens - a.first_chunk_tokens),
    itl_s=lambda a: _per(a.last_token_s - a.first_token_s, a.tokens - a.first_chunk_tokens),
    e2e_s=lambda a: a.last_token_s - a.sent_s,
    percentile=linear,
    interpolates="linear",
)
_INFERENCE_PERF = Definition(
    "inference-perf",
    "inference-perf, reportgen/base.py",
    {
        "ttft": "first token − sent, n > 1",
        "tpot": "(last token − first token) / (n − 1), n > 1",
        "itl": "one sample per token after the first: the gap, and 0 for further tokens of a chunk",
        "e2e": "end of the stream − sent",
    },
    ttft_s=lambda a: _if_streamed(a.first_token_s - a.sent_s, a),
    tpot_s=lambda a: _per(a.last_token_s - a.first_token_s, a.tokens - 1),
    itl_s=_gaps_and_zeros,
    e2e_s=lambda a: a.done_s - a.sent_s,
    percentile=linear,
    interpolates="linear",
)
_MLPERF = Definition(
    "mlperf",
    "MLPerf loadgen, results.cc",
    {
        "ttft": "first token − planned",
        "tpot": "(E2E − TTFT) / (n − 1), n > 1",
        "itl": "not defined",
        "e2e": "last token − planned",
    },
    ttft_s=lambda a: a.first_token_s - a.planned_s,
    tpot_s=lambda a: _per(a.last_token_s - a.first_token_s, a.tokens - 1),
    itl_s=lambda a: np.empty(0),
    e2e_s=lambda a: a.last_token_s - a.planned_s,
    percentile=floored,
    interpolates="sorted[⌊n·q⌋]",
)
_SLOBENCH = Definition(
    "slobench",
    "docs/metrics.md",
    {
        "ttft": "first token − released",
        "tpot": "(last token − first token) / (n − n_first_arrival)",
        "itl": "each gap between reads shared among the tokens that end it, one sample per token",
        "e2e": "last token − released",
    },
    ttft_s=lambda a: a.first_token_s - a.planned_s,
    tpot_s=lambda a: a.tpot_s,
    itl_s=lambda a: np.repeat(a.arrival_gap_s / a.arrival_gap_tokens, a.arrival_gap_tokens),
    e2e_s=lambda a: a.last_token_s - a.planned_s,
    percentile=nearest,
    interpolates="nearest rank",
)
DEFINITIONS: Mapping[str, Definition] = MappingProxyType(
    {d.name: d for d in (_SLOBENCH, _VLLM, _GUIDELLM, _AIPERF, _INFERENCE_PERF, _MLPERF)}
)
"""Every definition by name, slobench first."""


def answers(run: Run) -> Answers:
    """The due requests of a run that were successful and received a token."""
    columns, rows = per_request(run), run.request_rows
    kept = due_rows(run) & columns.is_ok & columns.has_token
    gaps, arrivals = event_gaps(run), columns.gaps
    of_kept = gaps.of(kept)
    of_arrivals = arrivals.of(kept & (columns.blocks is None))
    first_chunk_s = np.where(
        np.isfinite(rows["first_chunk_s"]), rows["first_chunk_s"], rows["first_token_s"]
    )
    return Answers(
        planned_s=rows["released_s"][kept],
        sent_s=rows["sent_s"][kept],
        first_chunk_s=first_chunk_s[kept],
        first_token_s=rows["first_token_s"][kept],
        last_token_s=rows["last_token_s"][kept],
        finish_s=rows["finish_s"][kept],
        done_s=rows["done_s"][kept],
        tokens=columns.output_tokens[kept],
        first_chunk_tokens=np.maximum(rows["first_chunk_tokens"][kept].astype(np.int64), 1),
        gap_s=gaps.icl_s[of_kept],
        gap_tokens=gaps.tokens[of_kept].astype(np.int64),
        tpot_s=columns.tpot_s[kept],
        arrival_gap_s=arrivals.icl_s[of_arrivals],
        arrival_gap_tokens=arrivals.tokens[of_arrivals].astype(np.int64),
    )


@dataclass(frozen=True, slots=True)
class Rescored:
    """A metric under a definition; seconds, NaN without samples."""

    definition: str
    metric: str
    formula: str
    n: int
    mean: float
    percentiles: Mapping[str, float]


def rescore(run: Run, names: tuple[str, ...] = tuple(DEFINITIONS)) -> list[Rescored]:
    """TTFT, TPOT, ITL and E2E of a run under each named definition. Other tools count the start of
    a closed loop."""
    own, whole = answers(run), answers(counting_start(run))
    return [
        _rescored(DEFINITIONS[name], metric, own if name == _SLOBENCH.name else whole)
        for metric in ("ttft", "tpot", "itl", "e2e")
        for name in names
    ]


def _rescored(definition: Definition, metric: str, inputs: Answers) -> Rescored:
    formula: Callable[[Answers], Values] = getattr(definition, f"{metric}_s")
    values = formula(inputs)
    ordered = np.sort(values[np.isfinite(values)])
    n = len(ordered)
    return Rescored(
        definition.name,
        metric,
        f"{definition.formulas[metric]}; percentiles {definition.interpolates}",
        n,
        float(ordered.mean()) if n else math.nan,
        {f"p{100 * q:g}": definition.percentile(ordered, q) if n else math.nan for q in QUANTILES},
    )
