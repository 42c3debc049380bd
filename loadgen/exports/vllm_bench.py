"""A run as the result file of `vllm bench serve --save-result --save-detailed`, for dashboards and
scripts that read it: the same keys, in the same units, by that tool's definitions.

Latencies count from the send, over successful requests; a chunk without a token (the role) begins
an answer; percentiles are interpolated; a rate covers the whole duration, drain included. The
requests due in the measured window stand for the requests of that tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.manifest.sections import Manifest
from loadgen.measure.attainment import due_rows, measured_window
from loadgen.measure.closed_loop import counting_start
from loadgen.measure.per_request import Seconds, TokenGaps, event_gaps, per_request
from loadgen.measure.slo import parse_slo
from loadgen.records import Run
from loadgen.units import parse_rate_per_s

PERCENTILES = (50, 90, 95, 99)
_BACKENDS = {
    "chat": "openai-chat",
    "completions": "openai",
    "embeddings": "openai-embeddings",
    "messages": "anthropic-messages",
    "rerank": "vllm-rerank",
    "responses": "openai-responses",
}
_GOODPUT_WORDS = {
    "ttft_s": "ttft",
    "ttft_from_send_s": "ttft",
    "tpot_s": "tpot",
    "e2e_s": "e2el",
    "e2e_from_send_s": "e2el",
}


def vllm_bench(run: Run) -> dict[str, Any]:
    """The content of the file. `generated_texts` are empty: answers are not kept.

    Source: vLLM, vllm/benchmarks/serve.py (`calculate_metrics`, `benchmark`, `main_async`).
    """
    run = counting_start(run)  # as that tool does
    outputs = _Outputs(run)
    return {**_setup(run, len(outputs.is_ok)), **outputs.result(_goodput_limits_s(run))}


class _Outputs:
    """The due requests in order of their ids, in that tool's terms; seconds."""

    def __init__(self, run: Run) -> None:
        columns, due = per_request(run), due_rows(run)
        rows, planned = run.request_rows[due], run.schedule_rows["input_tokens"][due]
        self.is_ok = (columns.is_ok & columns.has_token)[due]
        self.sent_s = np.nan_to_num(rows["sent_s"])  # 0.0 for unsent requests, as in that tool
        self.queue_s = np.nan_to_num(rows["sent_s"] - rows["released_s"])
        begun_s = np.fmin(rows["first_chunk_s"], rows["first_token_s"])
        self.ttft_s = np.where(np.isfinite(begun_s), begun_s - rows["sent_s"], 0.0)
        finish_s = rows["finish_s"]  # a chunk as any other there
        last_s = np.fmax(rows["last_token_s"], finish_s)
        self.latency_s = np.where(self.is_ok, last_s - rows["sent_s"], 0.0)
        self.input_lens = np.where(rows["input_tokens"] > 0, rows["input_tokens"], planned)
        self.output_lens = np.where(self.is_ok, columns.output_tokens[due], 0)
        self.errors = [
            "" if ok else run.names.errors[error] or "no token received"
            for ok, error in zip(self.is_ok, rows["error_id"], strict=True)
        ]
        self.itls_s = _gaps_of_each(
            event_gaps(run), due, rows["first_token_s"] - begun_s, finish_s - rows["last_token_s"]
        )
        self.duration_s = _duration_s(run, rows["done_s"])

    def result(self, limits_s: Mapping[str, float] | None) -> dict[str, Any]:
        ok, seconds = self.is_ok, self.duration_s
        n_in, n_out = int(self.input_lens[ok].sum()), int(self.output_lens.sum())
        tpot_s = (self.latency_s - self.ttft_s)[ok] / np.maximum(self.output_lens[ok] - 1, 1)
        has_tpot = self.output_lens[ok] > 1
        gaps_s = [gaps for gaps, good in zip(self.itls_s, ok, strict=True) if good]
        samples = {
            "ttft": self.ttft_s[ok],
            "tpot": tpot_s[has_tpot],
            "itl": np.concatenate([np.empty(0), *gaps_s]),
            "e2el": self.latency_s[ok],
        }
        judged = {**samples, "tpot": np.where(has_tpot, tpot_s, 0.0)}
        n_completed = int(np.count_nonzero(ok))
        peak_tokens, peak_requests = self._peaks()
        result = {
            "duration": seconds,
            "completed": n_completed,
            "failed": len(ok) - n_completed,
            "total_input_tokens": n_in,
            "total_output_tokens": n_out,
            "request_throughput": _per(n_completed, seconds),
            "request_goodput": None
            if limits_s is None
            else _per(_n_good(judged, limits_s, n_completed), seconds),
            "output_throughput": _per(n_out, seconds),
            "total_token_throughput": _per(n_in + n_out, seconds),
            "input_lens": self.input_lens.tolist(),
            "output_lens": self.output_lens.tolist(),
            "ttfts": self.ttft_s.tolist(),
            "itls": [gaps.tolist() for gaps in self.itls_s],
            "latencies": self.latency_s.tolist(),
            "start_times": self.sent_s.tolist(),
            "queue_times": self.queue_s.tolist(),
            "generated_texts": [""] * len(ok),
            "errors": self.errors,
            "max_output_tokens_per_s": peak_tokens,
            "max_concurrent_requests": peak_requests,
            "rtfx": 0.0,
        }
        for word, values_s in samples.items():
            result |= _statistics(word, 1e3 * values_s)
        return result

    def _peaks(self) -> tuple[float, int]:
        """The most chunks received, and the most requests in flight, in any second counted from the
        first send."""
        if not self.is_ok.any():
            return 0.0, 0
        good = np.flatnonzero(self.is_ok)
        zero_s = self.sent_s[good].min()
        at_s = [
            self.sent_s[k] + self.ttft_s[k] + np.r_[0.0, np.cumsum(self.itls_s[k])] for k in good
        ]
        chunks = np.bincount((np.concatenate(at_s) - zero_s).astype(np.int64))
        begins = (self.sent_s[good] - zero_s).astype(np.int64)
        ends = (self.sent_s[good] + self.latency_s[good] - zero_s).astype(np.int64)
        steps = np.bincount(begins, minlength=int(ends.max()) + 2)
        steps -= np.bincount(ends + 1, minlength=len(steps))
        return float(chunks.max()), int(np.cumsum(steps).max())


def _duration_s(run: Run, done_s: Seconds) -> float:
    """From the start of the window to the last end; of an imported run as its file states it."""
    origin, start_s = run.manifest.imported, measured_window(run).start_s
    if origin is not None and origin.duration_s is not None:
        return origin.duration_s
    ended_s = np.fmax.reduce(done_s, initial=np.nan)
    return float(np.fmax(ended_s, start_s) - start_s)


def _gaps_of_each(
    gaps: TokenGaps, due: NDArray[np.bool_], until_token_s: Seconds, until_finish_s: Seconds
) -> list[Seconds]:
    """Each due request's gaps between chunks, including those after an empty first chunk and before
    a finish reason in a chunk of its own."""
    row, rows = gaps.row, np.flatnonzero(due)
    begins, ends = np.searchsorted(row, rows), np.searchsorted(row, rows, side="right")
    return [
        np.r_[[wait_s] * (wait_s > 0), gaps.icl_s[begin:end], [finish_s] * (finish_s >= 0)]
        for begin, end, wait_s, finish_s in zip(
            begins, ends, until_token_s.tolist(), until_finish_s.tolist(), strict=True
        )
    ]


def _statistics(word: str, values_ms: Seconds) -> dict[str, float]:
    """Mean, median, population standard deviation and percentiles; 0 without samples, as in that
    tool."""
    values = values_ms if len(values_ms) else np.zeros(1)
    return {
        f"mean_{word}_ms": float(np.mean(values)),
        f"median_{word}_ms": float(np.median(values)),
        f"std_{word}_ms": float(np.std(values)),
        **{f"p{p}_{word}_ms": float(np.percentile(values, p)) for p in PERCENTILES},
    }


def _per(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _n_good(samples: Mapping[str, Seconds], limits_s: Mapping[str, float], n: int) -> int:
    good = np.ones(n, bool)
    for word, limit_s in limits_s.items():
        good &= samples[word] <= limit_s
    return int(np.count_nonzero(good))


def _goodput_limits_s(run: Run) -> dict[str, float] | None:
    """The run's per-request SLOs as `--goodput` takes them; None if there are none, or if a metric
    has no equivalent there."""
    manifest = run.manifest
    slos = [slo for slo in map(parse_slo, manifest.all_slos) if slo.scope == "request"]
    limits_s: dict[str, float] = {}
    for slo in slos:
        word = _GOODPUT_WORDS.get(slo.metric)
        if word is None or len(manifest.classes) > 1:
            return None
        limits_s[word] = min(slo.limit, limits_s.get(word, slo.limit))
    return limits_s or None


def _setup(run: Run, n_due: int) -> dict[str, Any]:
    """The settings of the run for which that tool has a key."""
    manifest = run.manifest
    target, arrivals = manifest.target, manifest.scenario.arrivals
    backend = _BACKENDS.get(target.api or "", "openai-chat")
    return {
        "date": _date(manifest),
        "endpoint_type": backend,
        "backend": backend,
        "label": manifest.run,
        "model_id": target.model,
        "tokenizer_id": target.model,
        "num_prompts": n_due,
        "request_rate": _rate_per_s(arrivals),
        "burstiness": _burstiness(arrivals),
        "max_concurrency": arrivals.get("users") or manifest.scenario.limits.max_concurrency,
    }


def _date(manifest: Manifest) -> str:
    return f"{datetime.fromisoformat(manifest.started_utc):%Y%m%d-%H%M%S}"


def _rate_per_s(arrivals: Mapping[str, Any]) -> float | str:
    """The offered rate; "inf" for arrivals without a rate, as in a closed loop."""
    rate = arrivals.get("rate")
    return "inf" if rate is None else parse_rate_per_s(rate)


def _burstiness(arrivals: Mapping[str, Any]) -> float | None:
    """1 / cv² of gamma gaps, 1.0 of a Poisson process; None for arrivals that the tool lacks."""
    if arrivals.get("kind") == "gamma":
        return float(1 / float(arrivals["cv"]) ** 2)
    return 1.0 if arrivals.get("kind") == "poisson" else None
