"""The catalogue of metrics: the name, unit and formula of every number that slobench reports.

The table in docs/metrics.md and the report's tooltips are generated from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Scope = Literal["request", "gap", "tree", "run"]
Direction = Literal["lower", "higher"]
Unit = Literal["s", "per_s", "share"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `scope` is the object that has a value: a request, a gap between chunks, a tree of
    requests (of recorded agents), the run.

    `slo` is the word in an SLO expression; "" for metrics of the load generator, which cannot have
    an SLO.
    """

    name: str
    title: str
    slo: str
    meaning: str
    formula: str
    edges: str
    source: str = "slobench"
    unit: Unit = "s"
    direction: Direction = "lower"
    scope: Scope = "request"


_MLPERF = "MLPerf loadgen (TTFT, TPOT)"
_VLLM = "vLLM bench serve, from the send instant there"

_ALL = (
    Metric(
        "ttft_s",
        "TTFT",
        "ttft",
        "Time to first token: how long the user waits for anything to appear.",
        "first_token − released",
        "No token received: undefined, and a miss. An empty role chunk is not a token.",
        source=_MLPERF,
    ),
    Metric(
        "ttft_from_send_s",
        "TTFT from send",
        "ttft_from_send",
        "The same, from when the request was actually sent: the server's own share.",
        "first_token − sent",
        "As TTFT.",
        source=_VLLM,
    ),
    Metric(
        "ttfat_s",
        "TTFAT",
        "ttfat",
        "Time to first answer token: the first content after any reasoning.",
        "first_answer − released",
        "Equals TTFT without reasoning. Only reasoning received: undefined, and a miss.",
        source="guidellm TTFOT, aiperf time_to_first_output_token",
    ),
    Metric(
        "tpot_s",
        "TPOT",
        "tpot",
        "Time per output token once the answer has begun: the reading speed.",
        "(last_token − first_token) / (n − n_first_arrival)",
        "An arrival is all that one read delivered. If the server states only the total, the"
        " first chunk has its share of the text. If it states nothing, each chunk counts as 1"
        " token (marked †). Hidden reasoning is left out of n. A single token: undefined, and"
        " passes an SLO. Several in one arrival: not measurable, never 0, and out of the n of an"
        " SLO.",
        source=_MLPERF,
    ),
    Metric(
        "itl_s",
        "ITL",
        "itl",
        "Inter-token latency: each gap shared among the tokens that end it, one value per token.",
        "(received[k] − received[k−1]) / tokens[k], counted tokens[k] times",
        "k counts arrivals, each all that one read delivered. Where the server does not count"
        " tokens per chunk, one token per chunk is assumed. Delivery in blocks: n/a.",
        source="sglang bench_serving (native)",
        scope="gap",
    ),
    Metric(
        "icl_s",
        "ICL",
        "icl",
        "Inter-chunk latency: the gap between consecutive chunks, the stall a user sees.",
        "received[k] − received[k−1]",
        "The first chunk ends no gap; it belongs to TTFT. Chunks of one read arrive together.",
        source="aiperf inter_chunk_latency; vLLM calls it ITL",
        scope="gap",
    ),
    Metric(
        "e2e_s",
        "E2E",
        "e2e",
        "From the scheduled send time to the last token: the whole wait.",
        "last_token − released",
        "Neither the usage line nor [DONE] counts. No token received: undefined, and a miss.",
    ),
    Metric(
        "e2e_from_send_s",
        "E2E from send",
        "e2e_from_send",
        "The same, from when the request was actually sent.",
        "last_token − sent",
        "As E2E.",
        source=_VLLM,
    ),
    Metric(
        "close_s",
        "Close",
        "close",
        "From the scheduled send time to the end of the response stream.",
        "done − released",
        "Never finished: undefined, and a miss.",
    ),
    Metric(
        "e2e_per_token_s",
        "E2E per token",
        "e2e_per_token",
        "Normalised latency: the whole wait shared among the output tokens.",
        "(last_token − released) / n",
        "n = 0: undefined, and a miss.",
        source="Orca (OSDI 2022), vLLM (SOSP 2023)",
    ),
    Metric(
        "max_itl_s",
        "Max ITL",
        "max_itl",
        "The slowest token of a request after its first chunk.",
        "max over k of (received[k] − received[k−1]) / tokens[k]",
        "A single token: undefined, and passes an SLO. Several in one arrival, and delivery in"
        " blocks: not measurable, as TPOT and ITL.",
    ),
    Metric(
        "max_stall_s",
        "Max stall",
        "max_stall",
        "The longest gap between two chunks of a request: the worst freeze a user saw.",
        "max over k of received[k] − received[k−1]",
        "Fewer than two chunks: undefined, and passes an SLO.",
    ),
    Metric(
        "queue_client_s",
        "Client queue",
        "",
        "How long the load generator itself held the request back, for any reason.",
        "sent − released",
        "Never sent: undefined.",
    ),
    Metric(
        "connect_s",
        "Connect",
        "",
        "Opening a new connection.",
        "connected − sent",
        "Undefined on a reused connection.",
    ),
    Metric(
        "lateness_s",
        "Lateness",
        "",
        "The client queue of requests with a scheduled send time: how late the load generator ran.",
        "sent − released",
        "Undefined for a request that waited for the answer to another request.",
    ),
    Metric(
        "attainment",
        "SLO attainment",
        "attainment",
        "The share of due requests that met every per-request SLO.",
        "met / due",
        "Failed, unfinished, dropped and unsent requests are misses. No per-request limit: n/a.",
        source="DistServe (OSDI 2024)",
        unit="share",
        direction="higher",
        scope="run",
    ),
    Metric(
        "task_time_s",
        "Task time",
        "task_time",
        "How long an agent's task took: a recorded conversation with its tools and subagents.",
        "last done − first released, of a tree",
        "A tree that has not ended has missed a limit that is over, and is open until then.",
        scope="tree",
    ),
    Metric(
        "wait_share",
        "Wait share",
        "wait_share",
        "The share of the task time in which the agent waited for answers, not for its tools.",
        "Σ (done − released) along the path that ended last / task time, of a tree",
        "A tree that has not ended is open.",
        unit="share",
        scope="tree",
    ),
    Metric(
        "tree_attainment",
        "Tree attainment",
        "attainment(tree)",
        "The share of agents' trees that met every limit per tree, with all their requests.",
        "met / (met + missed), of the trees whose first request is due",
        "Trees that have not ended count neither way; if they could decide, there is no verdict.",
        unit="share",
        direction="higher",
        scope="run",
    ),
    Metric(
        "error_rate",
        "Error rate",
        "error_rate",
        "The share of due requests that failed.",
        "failed / due",
        "Dropped and unsent requests count as errors; requests that the end of the drain cancelled"
        " do not.",
        unit="share",
        scope="run",
    ),
    Metric(
        "canary_match",
        "Canary match",
        "canary_match",
        "The share of canaries under load whose answer has the text that it had at idle.",
        "canaries with the same text / canaries",
        "Failed and empty answers count as different. No value without canaries (`--canary`).",
        unit="share",
        direction="higher",
        scope="run",
    ),
    Metric(
        "goodput",
        "Goodput",
        "goodput",
        "Requests per second that met every per-request SLO.",
        "met / window length",
        "Due in the measured window, no matter when they ended.",
        source="DistServe (OSDI 2024); vLLM --goodput divides by the whole duration",
        unit="per_s",
        direction="higher",
        scope="run",
    ),
    Metric(
        "goodput_output_tokens_per_s",
        "Token goodput",
        "goodput_output_tokens_per_s",
        "Output tokens per second of the requests that met every per-request SLO.",
        "Σ n over met / window length",
        "Due in the measured window, no matter when they ended. Without hidden reasoning.",
        unit="per_s",
        direction="higher",
        scope="run",
    ),
    Metric(
        "requests_per_s",
        "Request throughput",
        "requests_per_s",
        "Successful answers completed per second.",
        "ok requests with done inside the measured window / window length",
        "Counts requests due in any phase.",
        unit="per_s",
        direction="higher",
        scope="run",
    ),
    Metric(
        "output_tokens_per_s",
        "Output throughput",
        "output_tokens_per_s",
        "Output tokens received per second, from successful and failed answers alike.",
        "Σ tokens of chunks received inside the measured window / window length",
        "A request's n, without hidden reasoning, is spread evenly over its chunks where chunks"
        " carry no count.",
        unit="per_s",
        direction="higher",
        scope="run",
    ),
    Metric(
        "input_tokens_per_s",
        "Input throughput",
        "input_tokens_per_s",
        "Prompt tokens processed per second.",
        "Σ input tokens of requests with first_token inside the measured window / window length",
        "As the server counted them; planned lengths where it does not report a count.",
        unit="per_s",
        direction="higher",
        scope="run",
    ),
    Metric(
        "results_per_s",
        "Result throughput",
        "results_per_s",
        "Vectors of embeddings, or scores of a reranking, received per second.",
        "Σ results of ok requests with done inside the measured window / window length",
        "0 where answers have tokens.",
        unit="per_s",
        direction="higher",
        scope="run",
    ),
)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _ALL})
"""Every metric by name, in the order of the tables."""

BY_SLO_WORD: Mapping[str, Metric] = MappingProxyType({m.slo: m for m in _ALL if m.slo})
"""Metrics by their word in an SLO expression."""

OUTPUT_SPEED = "output_speed"
"""The word of an SLO on the inverse of TPOT: `output_speed >= 30/s` is `tpot <= 33.3ms`."""

PASSES_UNDEFINED = frozenset({"tpot_s", "max_itl_s", "max_stall_s"})
"""Metrics that an answer may be too short to have; such an answer meets an SLO on them."""


NEEDS_STREAM = frozenset(
    (
        *("ttft_s", "ttft_from_send_s", "ttfat_s", "tpot_s"),
        *("itl_s", "icl_s", "max_itl_s", "max_stall_s"),
    )
)
"""Metrics that an answer has only if it is streamed."""


NEEDS_TOKENS = frozenset((*NEEDS_STREAM, "e2e_per_token_s"))
"""Metrics that an answer has only if it has tokens."""


def markdown_table() -> str:
    """The table of docs/metrics.md, a row per metric."""
    head = "| Metric | In an SLO | Unit | Better | Meaning | Formula | At the edges | Source |"
    units = {"s": "seconds", "per_s": "per second", "share": "share"}
    rows = (
        f"| `{m.name}` | {f'`{m.slo}`' if m.slo else '–'} | {units[m.unit]} | {m.direction}"
        f" | {m.meaning} | {m.formula} | {m.edges} | {m.source} |"
        for m in _ALL
    )
    return "\n".join((head, "|" + "---|" * 8, *rows)) + "\n"
