"""The measuring parts of the GPU suite. Each adds its figures, and goals that are mostly shares of
the ceilings measured in the same stage. Times are measured at least twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from reference_engine.model.zoo import SHAPES
from reference_engine.policies.chunked import Chunked
from rig.gpu_ceilings import Repeats, ceilings, repeated
from rig.gpu_engine import (
    BuiltEngine,
    build_engine,
    decode_step_s,
    mixed_workload,
    run_workload,
)
from rig.gpu_kernels import KernelTiming, decode_timings, kernel_cases
from rig.gpu_peer import Peer
from rig.gpu_server import (
    CLIENTS,
    MODES,
    Mix,
    capacity_per_s,
    clients,
    mode_latencies,
    send_requests,
    server,
    set_mode,
    tokens_per_s,
)
from rig.gpu_session import Session

CONTEXTS = (1024, 4096, 8192)
OUTPUT = 8192
N_STEPS = 512  # timed up to each context
_PEER_S = 25.0  # for the peer's steps up to a context
_MIN_STEPS = 64
# The least share of the roof of a decode step at a context of 1024, by shape and rows.
_STEP_GOALS = {("0.6b", 32): 0.52, ("0.6b", 256): 0.6, ("8b", 32): 0.7, ("8b", 256): 0.7}
_MODES_LOAD = 0.6  # of the capacity measured with the same mix


def measure_ceilings(session: Session) -> None:
    top = ceilings(session.place)
    session.results.add("ceilings", asdict(top))
    print(
        f"copy {top.copy_bytes_per_s / 1e12:.2f} TB/s, matmul {top.matmul_flops / 1e12:.0f} TFLOP/s"
    )


def kernels(session: Session) -> None:
    config = SHAPES[session.shape("8b")]
    for name, measure in kernel_cases(
        session.ops(), config, session.place, session.top, session.tuning
    ):
        session.attempt(name, partial(_add_timings, session, "kernels", measure))


def _add_timings(session: Session, table: str, measure: Callable[[], list[KernelTiming]]) -> None:
    for timing in measure():
        session.results.add_row(table, asdict(timing))
        kernel, case, share = timing.kernel, timing.case, timing.share
        print(f"{kernel:18} {case:28} {timing.seconds * 1e6:9.1f} µs {share:7.1%} {timing.of}")
        if kernel == "decode attention" and not case.startswith("batch 1,"):
            session.results.add_goal(f"decode attention, {case}", share, 0.75, "of copy")


def mixed_batches(scale: int, longest: int = 32_768) -> dict[str, list[int]]:
    """Batches of unequal contexts, divided by `scale`."""
    batches = {
        "a row of 32 k among 63 of 1 k": [longest, *[1024] * 63],
        "4 rows of 16 k among 28 of 512": [*[longest // 2] * 4, *[512] * 28],
        "256 rows of 256 to 8 k": np.geomspace(256, 8192, 256).astype(int).tolist(),
    }
    return {
        name: [max(1, context // scale) for context in contexts[:: max(1, scale // 4)]]
        for name, contexts in batches.items()
    }


def mixed_contexts(session: Session) -> None:
    """Decode attention and decode steps of batches of unequal contexts."""
    place, config = session.place, SHAPES[session.shape("8b")]
    batches = mixed_batches(place.scale)
    for name, contexts in batches.items():
        measure = partial(
            decode_timings,
            session.ops(),
            config,
            place,
            session.top,
            contexts,
            name,
            session.tuning,
        )
        session.attempt(name, partial(_add_timings, session, "mixed_contexts", measure))
    engine = build_engine(session.shape("8b"), place, max_model_len=40_960 // place.scale + 64)
    for name, contexts in batches.items():
        session.attempt(f"step, {name}", partial(_mixed_step, session, engine, name, contexts))


def _mixed_step(session: Session, engine: BuiltEngine, name: str, contexts: Sequence[int]) -> None:
    took = repeated(lambda: decode_step_s(engine, contexts))
    mean = sum(contexts) / len(contexts)
    roof_s = session.top.decode_roof_s(SHAPES[session.shape("8b")], len(contexts), mean)
    row = {"case": name, "rows": len(contexts), **_times(took), "share": roof_s / took.seconds}
    session.results.add_row("mixed_steps", row)
    session.results.add_goal(
        f"decode step 8b, {name}",
        roof_s / took.seconds,
        0.7,
        "of roof",
        label=f"{took.seconds * 1e3:.3g} ms",
    )


def decode_steps(session: Session) -> None:
    for name in ("0.6b", "8b"):
        session.attempt(f"decode steps of {name}", partial(_decode_steps, session, name))


def _decode_steps(session: Session, name: str) -> None:
    engine = build_engine(session.shape(name), session.place)
    for n_rows in (1, 32, 256):
        session.attempt(
            f"decode step {name}, batch {n_rows}",
            partial(_decode_step, session, engine, name, n_rows),
        )


def _decode_step(session: Session, engine: BuiltEngine, name: str, n_rows: int) -> None:
    config, context = SHAPES[session.shape(name)], 1024 // session.place.scale
    contexts = [context] * session.place.rows(n_rows)
    took = repeated(lambda: decode_step_s(engine, contexts, is_ahead=True))
    alone = repeated(lambda: decode_step_s(engine, contexts))
    roof_s = session.top.decode_roof_s(config, n_rows, context)
    share = roof_s / took.seconds
    row = {
        "shape": name,
        "rows": n_rows,
        "context": context,
        **_times(took),
        "share": share,
        "alone_s": alone.seconds,
        "alone_share": roof_s / alone.seconds,
    }
    session.results.add_row("decode_steps", row)
    print(
        f"{name} × {n_rows}: {took.seconds * 1e3:.3f} ms, {share:.1%} of roof; "
        f"alone {alone.seconds * 1e3:.3f} ms, {roof_s / alone.seconds:.1%}"
    )
    if (name, n_rows) in _STEP_GOALS:
        session.results.add_goal(
            f"decode step {name}, batch {n_rows}",
            share,
            _STEP_GOALS[name, n_rows],
            "of roof",
            label=f"{took.seconds * 1e3:.3g} ms",
        )


def _times(took: Repeats) -> dict[str, Any]:
    return {"seconds": took.seconds, "each_s": took.each_s}


def long_answers(session: Session) -> None:
    """Batch 32, 8 k outputs: steps timed up to three contexts, the others interpolated."""
    engine = build_engine(session.shape("8b"), session.place)
    n_steps = (8 if session.is_small else N_STEPS) // 2  # twice
    config, scale = SHAPES[session.shape("8b")], session.place.scale
    figures: dict[str, Any] = {"points": {}, "each_s": {}}
    roofs: dict[int, float] = {}
    for context in CONTEXTS:
        middle = context - n_steps // 2

        def measure(context: int = context, middle: int = middle) -> None:
            contexts = [(context - n_steps) // scale] * session.place.rows(32)
            took = repeated(lambda: decode_step_s(engine, contexts, n_steps))
            figures["points"][middle], figures["each_s"][middle] = took.seconds, took.each_s
            roofs[middle] = session.top.decode_roof_s(config, 32, middle / scale)
            session.results.add("long_answers", figures)

        session.attempt(f"8b × 32, {n_steps} steps to {context}", measure)
    if len(roofs) == len(CONTEXTS):
        total_s = extrapolated_s(figures["points"], OUTPUT)
        share = extrapolated_s(roofs, OUTPUT) / total_s
        session.results.add("long_answers", figures | {"total_s": total_s, "share": share})
        _add_long_goal(session, "extrapolated", share, total_s)


def whole_long_answers(session: Session) -> None:
    """Batch 32, 8 k outputs at full length; once, as it takes minutes."""
    engine = build_engine(session.shape("8b"), session.place)
    config, n_rows = SHAPES[session.shape("8b")], session.place.rows(32)
    n_output = OUTPUT // session.place.scale
    done = run_workload(engine, [([1] * 16, n_output)] * n_rows)
    roof_s = sum(
        session.top.decode_roof_s(config, n_rows, 16 + output) for output in range(n_output)
    )
    share = roof_s / done.duration_s
    session.results.add("long", {"whole_s": done.duration_s, "share": share})
    _add_long_goal(session, "whole", share, done.duration_s)


def _add_long_goal(session: Session, method: str, share: float, total_s: float) -> None:
    name = f"8b, batch 32, 8 k outputs, {method}"
    session.results.add_goal(name, share, 0.7, "of roof", label=f"{total_s:.3g} s")


def extrapolated_s(step_s: Mapping[int, float], n_steps: int) -> float:
    """Seconds of steps at contexts 1 … n_steps, from `step_s` at a few contexts: linear between
    them, constant outside."""
    contexts = sorted(step_s)
    steps = np.interp(np.arange(1, n_steps + 1), contexts, [step_s[c] for c in contexts])
    return float(steps.sum())


def throughput(session: Session) -> None:
    low, high, n = (100, 1024, 256) if not session.is_small else (4, 20, 8)
    name = session.shape("0.6b")
    engine = build_engine(name, session.place)
    workload = mixed_workload(n, low, high, SHAPES[name].vocab_size)
    run_workload(engine, mixed_workload(8, low, high, 256, seed=1))  # warms the allocator
    runs = []
    for _ in range(2):
        runs.append(run_workload(engine, workload))
        session.results.add("throughput", {"runs": [asdict(run) for run in runs]})
    duration_s = sum(run.duration_s for run in runs) / len(runs)
    lengths = [(len(prompt), n_output) for prompt, n_output in workload]
    share = session.top.work_roof_s(SHAPES[name], lengths, 256) / duration_s
    rate = runs[0].output_tokens / duration_s
    figures = session.results.figures["throughput"] | {"tokens_per_s": rate, "share": share}
    session.results.add("throughput", figures)
    session.results.add_goal(
        f"{n} requests, in/out U({low}, {high}), 0.6b",
        share,
        0.55,
        "of roof",
        label=f"{rate:.0f} tok/s",
    )
    cpu_ms = max(run.plan_s + run.prepare_s for run in runs) * 1e3
    session.results.add_goal("plan + prepare at 256 sequences", cpu_ms, 0.3, "ms", is_floor=False)


def over_http(session: Session) -> None:
    """256 streams of 2 048 tokens, so that arrivals and prompts are a small share of the time;
    twice through the server, then twice with a warm engine in this process: a server that has ended
    holds no memory of the device."""
    n, n_prompt, n_output = (256, 128, 2048) if not session.is_small else (2, 20, 8)
    name = session.shape("1b")
    log_dir = session.logs / "steps-http"
    n_seqs = 256 if not session.is_small else 8
    with (
        server(name, session.place, log_dir, n_seqs) as url,
        clients(min(CLIENTS, n)) as senders,
    ):
        send_requests(senders, url, [(0.0, n_prompt, 8)] * n)
        requests = [(0.0, n_prompt, n_output)] * n
        served = [tokens_per_s(send_requests(senders, url, requests)) for _ in range(2)]
    session.results.add("http", {"served": served})
    engine = build_engine(name, session.place, max_model_len=4096)
    budget = Chunked().token_budget  # the same as in the server's mode
    assert budget != "slo"
    run_workload(engine, [([1] * n_prompt, 8)] * n, budget)
    work = [([1] * n_prompt, n_output)] * n
    alone = [run_workload(engine, work, budget).tokens_per_s for _ in range(2)]
    share = sum(served) / sum(alone)
    session.results.add("http", {"alone": alone, "served": served, "share": share})
    session.results.add_goal(
        "HTTP path against the engine alone, 256 streams, 1b",
        share,
        0.95,
        label=f"{sum(served) / 2:.0f} tok/s",
    )
    del engine
    session.place.release_memory()
    figures = {"bytes_left": session.place.used_bytes()}
    session.results.add("http", session.results.figures["http"] | figures)


def modes(session: Session) -> None:
    """Batching modes under the same schedule, at a share of the capacity of mode `chunked` with the
    same mix of requests."""
    name, is_small = session.shape("1b"), session.is_small
    duration_s, mix, n = (4.0, Mix(), 384) if not is_small else (0.2, Mix((5, 34), 300, (5, 25)), 4)
    n_seqs = 256 if not is_small else 8
    log_dir = session.logs / "steps-modes"
    with (
        server(name, session.place, log_dir, n_seqs) as url,
        clients(min(CLIENTS, n)) as senders,
    ):
        set_mode(url, "chunked")
        capacity_per_s(senders, url, n, mix)  # warms the server
        capacity = [capacity_per_s(senders, url, n, mix) for _ in range(2)]
        rate = _MODES_LOAD * sum(capacity) / 2 if not is_small else 10.0
        figures: dict[str, Any] = {"capacity_per_s": capacity, "rate_per_s": rate, "of": {}}
        runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
        for _ in range(2):  # in turn, so that a stage cut short has all modes
            for mode in MODES:

                def measure(mode: str = mode) -> None:
                    runs[mode].append(mode_latencies(senders, url, mode, rate, duration_s, mix))
                    figures["of"][mode] = _mean_of(runs[mode]) | {"runs": runs[mode]}
                    session.results.add("modes", figures)

                session.attempt(f"mode {mode}", measure)


def _mean_of(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return {key: sum(run[key] for run in runs) / len(runs) for key in runs[0]}


def generate_batch(session: Session) -> None:
    """Continuous batching of `transformers`, which has a goal, at the contexts of our steps."""
    figures: dict[str, Any] = {}
    peer = _peer(session, "generate_batch", figures)
    if peer is None:
        return
    n_rows = session.place.rows(32)
    points = session.before.get("long_answers", {}).get("points", {})
    our_steps = {int(context): seconds for context, seconds in points.items()}
    peer_steps: dict[int, float] = {}
    for context in CONTEXTS:
        n_new = _n_steps(session, peer_steps, context)

        def measure(context: int = context, n_new: int = n_new) -> None:
            took = repeated(
                lambda: peer.generate_batch_step_s(
                    n_rows, (context - n_new) // session.place.scale, n_new
                )
            )
            figures[f"generate_batch, {n_new} steps to {context}"] = took.seconds
            figures.setdefault("each_s", {})[f"generate_batch {context}"] = took.each_s
            peer_steps[context - n_new // 2] = took.seconds
            session.results.add("generate_batch", figures)

        session.attempt(f"generate_batch, {n_new} steps to {context}", measure)
        figures.update(peer.resolved)
    if our_steps and len(peer_steps) == len(CONTEXTS):
        total_s = extrapolated_s(peer_steps, OUTPUT)
        ratio = total_s / extrapolated_s(our_steps, OUTPUT)
        figures.update({"generate_batch, extrapolated": total_s, "ratio": ratio})
        session.results.add_goal(
            "generate_batch / ours, 8b × 32, 8 k outputs, extrapolated",
            ratio,
            2.0,
            label=f"{total_s:.3g} s; graphs {figures.get('cuda graphs')}, "
            f"async {figures.get('async batching')}, {figures.get('paged attention')}",
        )
    session.results.add("generate_batch", figures)


def generate(session: Session) -> None:
    """Static batches of `transformers`, for information."""
    figures: dict[str, Any] = {}
    peer = _peer(session, "generate", figures)
    if peer is None:
        return
    n_rows, n_new = session.place.rows(32), 4 if session.is_small else _MIN_STEPS
    for context in CONTEXTS:

        def measure(context: int = context) -> None:
            took = repeated(
                lambda: peer.generate_step_s(
                    n_rows, (context - n_new) // session.place.scale, n_new
                )
            )
            figures[f"generate, {n_new} steps to {context}"] = took.seconds
            figures.setdefault("each_s", {})[f"generate {context}"] = took.each_s
            session.results.add("generate", figures)

        session.attempt(f"generate, {n_new} steps to {context}", measure)


def _peer(session: Session, part: str, figures: dict[str, Any]) -> Peer | None:
    """`transformers` with the weights of our shape; without it, None in a rehearsal."""
    try:
        peer = Peer(session.shape("8b"), session.place)
    except ImportError as error:
        session.results.add(part, {"not run": str(error)})
        if not session.is_rehearsal:
            raise
        print(f"not rehearsed: {error}")
        return None
    figures |= {"version": peer.version, "attention": peer.attention}
    session.results.add(part, figures)
    return peer


def _n_steps(session: Session, peer_steps: Mapping[int, float], context: int) -> int:
    """The number of the peer's steps to time: as many as ours, but fewer if they would take too
    long. The estimate is the last measured step, scaled by the ratio of the contexts."""
    if session.is_small:
        return 4
    if not peer_steps:
        return N_STEPS // 2
    before = max(peer_steps)
    n = int(_PEER_S / 2 / (peer_steps[before] * context / before))
    return max(_MIN_STEPS, min(N_STEPS // 2, n))
