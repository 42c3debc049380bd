"""Other load generators, where they are installed, against the same server at the same rate.

Their files do not name requests as ours do, so a peer's percentiles are held against those of the
server's log, and what it did is read from the log alone. Commands: each tool's own documentation.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rig.clients import OTHER_EVENTS, Load, cpu_s_of_children
from targets.truth_server import truth_server

_MOST_S = 300.0
_INPUT_TOKENS = 16


@dataclass(frozen=True)
class Peer:
    """A program and its words; `{out}` is a folder. `ttft_ms` finds (p50, p99) in its result."""

    program: str
    words: str
    result: str
    ttft_ms: Callable[[Mapping[str, Any]], tuple[float, float]]


def _of_vllm(found: Mapping[str, Any]) -> tuple[float, float]:
    return found["median_ttft_ms"], found["p99_ttft_ms"]


def _of_aiperf(found: Mapping[str, Any]) -> tuple[float, float]:
    ttft = found["time_to_first_token"]
    return ttft["p50"], ttft["p99"]


def _of_guidellm(found: Mapping[str, Any]) -> tuple[float, float]:
    metrics = found["benchmarks"][0]["metrics"]
    percentiles = metrics["time_to_first_token_ms"]["successful"]["percentiles"]
    return percentiles["p50"], percentiles["p99"]


PEERS = {
    "vllm bench": Peer(
        "vllm",
        "bench serve --backend openai-chat --endpoint /v1/chat/completions --base-url {url}"
        " --model mock --tokenizer {tokenizer} --dataset-name random"
        " --random-input-len {input} --random-output-len {tokens} --ignore-eos"
        " --request-rate {rate} --num-prompts {n} --percentile-metrics ttft"
        " --metric-percentiles 99 --save-result --result-dir {out} --result-filename result.json",
        "result.json",
        _of_vllm,
    ),
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


def measure(
    peer: Peer, load: Load, folder: Path, tokenizer: Path, **script: Any
) -> dict[str, float]:
    """What a peer made of a load in one run on the core that the server leaves it; raises
    RuntimeError with the end of its words where it failed."""
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
        before_s, started_s = cpu_s_of_children(), time.monotonic()
        with server.client_cores():
            os.sched_setaffinity(0, {max(server.client_cpus)})
            _run([peer.program, *words.split()])
        took_s, used_s = time.monotonic() - started_s, cpu_s_of_children() - before_s
        rows = server.finish().rows
    rows = rows[rows["first_ns"] > 0]
    true_ms = 1e-6 * (rows["first_ns"] - rows["read_ns"])
    span_s = 1e-9 * float(np.ptp(rows["arrived_ns"]))
    told = _told(peer, out / peer.result)
    return {
        "requests/s": (len(rows) - 1) / span_s if span_s else math.nan,
        "TTFT p50 too high by ms": told[0] - float(np.quantile(true_ms, 0.5)),
        "TTFT p99 too high by ms": told[1] - float(np.quantile(true_ms, 0.99)),
        "whole command CPU µs/event": 1e6
        * used_s
        / (int(rows["sent_tokens"].sum()) + OTHER_EVENTS * len(rows)),
        "start to exit s": took_s,
    }


def _told(peer: Peer, path: Path) -> tuple[float, float]:
    """NaN for what its result does not say, or not where it used to."""
    try:
        p50, p99 = peer.ttft_ms(json.loads(path.read_text()))
    except (OSError, ValueError, LookupError, TypeError):
        return math.nan, math.nan
    return float(p50), float(p99)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_MOST_S,
            check=False,
            env=dict(os.environ) | {"NO_COLOR": "1", "HF_HUB_OFFLINE": "1"},
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it did not end within {_MOST_S:g} s") from None
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {(done.stderr or done.stdout)[-300:].strip()}")
