"""Other load generators, where they are installed, against the same server at the same rate.

Their files do not name requests as ours do. Where a peer writes a row per request, its rows are
joined with the server's log in the order of their sends; in any case its percentiles are held
against those of the log. Commands: each tool's own documentation.

`vllm-rs` is the client in Rust inside vLLM's wheel, run as it is:

    pip download --no-deps --dest DIR vllm==0.33.0 && unzip DIR/vllm-*.whl vllm/vllm-rs -d DIR
    chmod +x DIR/vllm/vllm-rs && PATH=DIR/vllm:$PATH python benchmarks/fidelity.py
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rig.clients import OTHER_EVENTS, Load, finished, waits_s
from targets.truth_server import truth_server

_INPUT_TOKENS = 16


@dataclass(frozen=True)
class Peer:
    """A program and its words; `{out}` is a folder. `ttft_ms` finds (p50, p99) in its result,
    `rows` the send time and the TTFT of each request, seconds. A tokenizer of words, made here,
    is enough for some."""

    program: str
    words: str
    result: str
    ttft_ms: Callable[[Mapping[str, Any]], tuple[float, float]]
    rows: Callable[[Mapping[str, Any]], tuple[Sequence[float], Sequence[float]]] | None = None
    takes_any_tokenizer: bool = False


def _of_vllm(found: Mapping[str, Any]) -> tuple[float, float]:
    return found["median_ttft_ms"], found["p99_ttft_ms"]


def _rows_of_vllm(found: Mapping[str, Any]) -> tuple[Sequence[float], Sequence[float]]:
    return found["start_times"], found["ttfts"]


def _of_aiperf(found: Mapping[str, Any]) -> tuple[float, float]:
    ttft = found["time_to_first_token"]
    return ttft["p50"], ttft["p99"]


def _of_guidellm(found: Mapping[str, Any]) -> tuple[float, float]:
    metrics = found["benchmarks"][0]["metrics"]
    percentiles = metrics["time_to_first_token_ms"]["successful"]["percentiles"]
    return percentiles["p50"], percentiles["p99"]


_OF_VLLM = (
    "bench serve --backend openai-chat --endpoint /v1/chat/completions --base-url {url}"
    " --model mock --tokenizer {tokenizer} --dataset-name random"
    " --random-input-len {input} --random-output-len {tokens} --ignore-eos"
    " --request-rate {rate} --num-prompts {n} --percentile-metrics ttft --metric-percentiles 99"
    " --save-result --save-detailed --result-dir {out} --result-filename result.json"
)
PEERS = {
    "vllm-rs": Peer(
        "vllm-rs",
        _OF_VLLM + " --temperature 0 --disable-tqdm",
        "result.json",
        _of_vllm,
        _rows_of_vllm,
        takes_any_tokenizer=True,
    ),
    "vllm bench": Peer("vllm", _OF_VLLM, "result.json", _of_vllm, _rows_of_vllm),
    "aiperf": Peer(
        "aiperf",
        "profile --model mock --url {url} --endpoint-type chat --streaming --tokenizer {tokenizer}"
        " --use-server-token-count --isl {input} --osl {tokens} --extra-inputs ignore_eos:true"
        " --request-rate {rate} --arrival-pattern poisson --request-count {n} --random-seed 1"
        " --no-gpu-telemetry --no-server-metrics --ui-type none --artifact-dir {out}",
        "profile_export_aiperf.json",
        _of_aiperf,
    ),
    "guidellm": Peer(
        "guidellm",
        "run --backend kind=openai_http,target={url},model=mock,validate_backend=false,"
        "request_format=/v1/chat/completions --tokenizer kind=huggingface_auto,model={tokenizer}"
        " --data kind=synthetic_text,prompt_tokens={input},output_tokens={tokens}"
        " --profile kind=poisson,rate={rate} --constraint kind=max_duration,seconds={seconds}"
        " --output kind=json,path={out}/result.json --disable-console-interactive",
        "result.json",
        _of_guidellm,
    ),
}


def installed() -> Iterator[tuple[str, Peer]]:
    """Those of PEERS whose program is found."""
    return ((name, peer) for name, peer in PEERS.items() if shutil.which(peer.program))


def word_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer of 2 000 words into a new folder in `folder`, and returns that folder."""
    vocabulary = {"<unk>": 0} | {f"w{number}": number for number in range(1, 2000)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    absent = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    content: dict[str, Any] = {
        "version": "1.0",
        **dict.fromkeys(absent),
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    }
    home = folder / "tokenizer"
    home.mkdir(exist_ok=True)
    (home / "tokenizer.json").write_text(json.dumps(content))
    return home


def measure(
    peer: Peer, load: Load, folder: Path, tokenizer: Path, **script: Any
) -> dict[str, float]:
    """The figures of a peer in one run on the core that the server leaves it; raises RuntimeError
    with the end of its output where it failed."""
    out = folder / "peer"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    with truth_server(folder, cache_dir=folder, **script) as server:
        words = peer.words.format(
            url=server.url,
            tokenizer=tokenizer,
            input=_INPUT_TOKENS,
            tokens=load.tokens,
            rate=f"{load.rate_per_s:g}",
            seconds=f"{load.for_s:g}",
            n=round(load.rate_per_s * load.for_s),
            out=out,
        )
        with server.client_cores():
            os.sched_setaffinity(0, {max(server.client_cpus)})
            done = finished(
                [peer.program, *words.split()], {"NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
            )
        rows = server.finish().rows
    if done.exit_code:
        raise RuntimeError(f"exit {done.exit_code}: {done.output[-300:].strip()}")
    rows = rows[rows["first_ns"] > 0]
    true_ms = 1e-6 * (rows["first_ns"] - rows["read_ns"])
    span_s = 1e-9 * float(np.ptp(rows["arrived_ns"]))
    result = _read_result(out / peer.result)
    p50_ms, p99_ms = _stated(peer, result)
    wrong_ms = errors_ms(peer, result, true_ms[np.argsort(rows["arrived_ns"], kind="stable")])
    start_s, tail_s = waits_s(done, rows["arrived_ns"], rows["last_ns"])
    n_events = int(rows["sent_tokens"].sum()) + OTHER_EVENTS * len(rows)
    return {
        "requests/s": (len(rows) - 1) / span_s if span_s else math.nan,
        "TTFT error p50 ms": float(np.quantile(wrong_ms, 0.5)) if len(wrong_ms) else math.nan,
        "TTFT error p99 ms": float(np.quantile(wrong_ms, 0.99)) if len(wrong_ms) else math.nan,
        "TTFT p50 too high by ms": p50_ms - float(np.quantile(true_ms, 0.5)),
        "TTFT p99 too high by ms": p99_ms - float(np.quantile(true_ms, 0.99)),
        "whole command CPU µs/event": 1e6 * done.cpu_s / n_events,
        "whole command CPU s": done.cpu_s,
        "start to first request s": start_s,
        "last token to exit s": tail_s,
        "peak memory MB": done.peak_mb,
    }


def _read_result(path: Path) -> Mapping[str, Any]:
    """The content of a peer's result file; empty where it cannot be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _stated(peer: Peer, result: Mapping[str, Any]) -> tuple[float, float]:
    """(p50, p99) of TTFT, ms; NaN where the result has none in the known place."""
    try:
        p50, p99 = peer.ttft_ms(result)
    except (LookupError, TypeError):
        return math.nan, math.nan
    return float(p50), float(p99)


def errors_ms(
    peer: Peer, result: Mapping[str, Any], true_ms: NDArray[np.float64]
) -> NDArray[np.float64]:
    """|own TTFT - true TTFT| of each request, ms; `true_ms` is in the order of arrival. Empty
    without a row per request. Requests sent within the same microseconds may be exchanged."""
    try:
        starts_s, ttfts_s = ([], []) if peer.rows is None else peer.rows(result)
    except (LookupError, TypeError):
        return np.empty(0)
    if len(ttfts_s) != len(true_ms):
        return np.empty(0)
    own_ms = 1e3 * np.array(ttfts_s)[np.argsort(starts_s, kind="stable")]
    wrong_ms: NDArray[np.float64] = np.abs(own_ms - true_ms)
    return wrong_ms
