"""Other load generators, where they are installed, against the same server at the same rate.

Commands and the reading of their files are those of `slobench demo truth`
(loadgen/studies/demo/peers.py). Their files do not name requests as ours do: the rows of a file are
joined with the server's log in the order of their sends, and its percentiles are held against those
of the log.

`vllm-rs` is the client in Rust inside vLLM's wheel, run as it is:

    pip download --no-deps --dest DIR vllm==0.33.0 && unzip DIR/vllm-*.whl vllm/vllm-rs -d DIR
    chmod +x DIR/vllm/vllm-rs && PATH=DIR/vllm:$PATH python benchmarks/fidelity.py
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import UsageError
from loadgen.foreign.read import imported_runs
from loadgen.records import Run
from loadgen.studies.demo.bounded_command import finished
from loadgen.studies.demo.figures import counted, figures_of, held_per_s, recorded, rows_behind
from loadgen.studies.demo.figures import true as true_latencies
from loadgen.studies.demo.peers import Peer, values_of, words
from rig.clients import OTHER_EVENTS, Load, waits_s
from targets.truth_server import truth_server

_INPUT_TOKENS = 16


def measure(
    peer: Peer, load: Load, folder: Path, tokenizer: Path, **script: Any
) -> dict[str, float]:
    """The figures of a peer in one run on the core that the server leaves it; raises RuntimeError
    with the end of its output where it failed."""
    out = folder / "peer"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    with truth_server(folder, cache_dir=folder, **script) as server:
        values = values_of(
            peer,
            url=server.url,
            tokenizer=tokenizer,
            input_tokens=_INPUT_TOKENS,
            output_tokens=load.tokens,
            rate_per_s=load.rate_per_s,
            seconds=load.for_s,
            out=out,
            seed=1,
        )
        with server.client_cores():
            os.sched_setaffinity(0, {max(server.client_cpus)})
            done = finished(words(peer.command, values), {"NO_COLOR": "1"})
        log = server.finish()
    if done.exit_code:
        raise RuntimeError(f"exit {done.exit_code}: {done.output[-300:].strip()}")
    try:
        _, run = next(imported_runs([out / peer.result], (), ""))
    except UsageError as error:
        raise RuntimeError(str(error)) from None
    rows = rows_behind(run, log)
    reported, truth = figures_of(recorded(run)), figures_of(true_latencies(rows, log))
    wrong_ms = errors_ms(run, 1e-6 * (rows["first_ns"] - rows["read_ns"]))
    answered = log.rows[log.rows["last_ns"] > 0]
    start_s, tail_s = waits_s(done, answered["arrived_ns"], answered["last_ns"])
    n_events = int(answered["sent_tokens"].sum()) + OTHER_EVENTS * len(answered)
    return {
        "requests/s": held_per_s(rows),
        "TTFT error p50 ms": float(np.quantile(wrong_ms, 0.5)),
        "TTFT error p99 ms": float(np.quantile(wrong_ms, 0.99)),
        "TTFT p50 too high by ms": 1e3 * (reported.ttft_p50_s - truth.ttft_p50_s),
        "TTFT p99 too high by ms": 1e3 * (reported.ttft_p99_s - truth.ttft_p99_s),
        "whole command CPU µs/event": 1e6 * done.cpu_s / n_events,
        "whole command CPU s": done.cpu_s,
        "start to first request s": start_s,
        "last token to exit s": tail_s,
        "peak memory MB": done.peak_mb,
    }


def errors_ms(run: Run, true_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """|own TTFT - true TTFT| of each counted request, ms; `true_ms` is in the order of arrival.
    Requests sent within the same microseconds may be exchanged."""
    rows = run.request_rows[counted(run)]
    rows = rows[np.argsort(rows["sent_s"], kind="stable")]
    wrong_ms: NDArray[np.float64] = np.abs(1e3 * (rows["first_token_s"] - rows["sent_s"]) - true_ms)
    return wrong_ms
