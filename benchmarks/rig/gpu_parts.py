"""The measuring parts of the GPU suite. Each adds its figures, and goals that are mostly shares of
the ceilings measured in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from reference_engine.model.zoo import SHAPES
from reference_engine.policies.chunked import Chunked
from rig.gpu_ceilings import ceilings
from rig.gpu_engine import (
    BuiltEngine,
    build_engine,
    decode_step_s,
    mixed_workload,
    run_workload,
)
from rig.gpu_kernels import all_kernels
from rig.gpu_peer import Peer
from rig.gpu_server import compared_modes, send_requests, server, tokens_per_s
from rig.gpu_session import Session

CONTEXTS = (1024, 4096, 8192)
OUTPUT = 8192
N_STEPS = 512  # timed up to each context
_PEER_S = 40.0  # for the peer's steps up to a context, except in long runs
_MIN_STEPS = 64


def measure_ceilings(session: Session) -> None:
    session.top = ceilings(session.place)
    session.results.add("ceilings", asdict(session.top))
    print(
        f"copy {session.top.copy_bytes_per_s / 1e12:.2f} TB/s, "
        f"matmul {session.top.matmul_flops / 1e12:.0f} TFLOP/s"
    )


def kernels(session: Session) -> None:
    config = SHAPES[session.shape("8b")]
    timings = all_kernels(session.ops(), config, session.place, session.top)
    session.results.add("kernels", [asdict(timing) for timing in timings])
    for timing in timings:
        kernel, case, share = timing.kernel, timing.case, timing.share
        print(f"{kernel:18} {case:28} {timing.seconds * 1e6:9.1f} µs {share:7.1%} {timing.of}")
        if kernel == "decode attention" and not case.startswith("batch 1,"):
            session.results.add_goal(f"decode attention, {case}", share, 0.75, "of copy")


def decode_steps(session: Session) -> None:
    rows: list[dict[str, Any]] = []
    for name in ("0.6b", "8b"):
        engine = build_engine(session.shape(name), session.place)
        config, context = SHAPES[session.shape(name)], 1024 // session.place.scale
        for n_rows in (1, 32, 256):
            seconds = decode_step_s(engine, session.place.rows(n_rows), context)
            share = session.top.decode_roof_s(config, n_rows, context) / seconds
            row = {"shape": name, "rows": n_rows, "context": context, "seconds": seconds}
            rows.append(row | {"share": share})
            session.results.add("decode_steps", rows)
            print(f"{name} × {n_rows}: {seconds * 1e3:.3f} ms, {share:.1%} of roof")
            if n_rows > 1:
                session.results.add_goal(
                    f"decode step {name}, batch {n_rows}", share, 0.6, "of roof",
                    label=f"{seconds * 1e3:.3g} ms",
                )  # fmt: skip
        if name == "8b":
            _long_answers(session, engine)
        del engine
        session.place.release_memory()


def _long_answers(session: Session, engine: BuiltEngine) -> None:
    """Batch 32, 8 k outputs: steps timed up to three contexts, the others interpolated."""
    n_steps = 8 if session.is_small else N_STEPS
    config, scale = SHAPES[session.shape("8b")], session.place.scale
    points, roofs = {}, {}
    for context in CONTEXTS:
        middle = context - n_steps // 2
        points[middle] = decode_step_s(
            engine, session.place.rows(32), (context - n_steps) // scale, n_steps
        )
        roofs[middle] = session.top.decode_roof_s(config, 32, middle // scale)
    total_s, roof_s = (extrapolated_s(steps, OUTPUT) for steps in (points, roofs))
    figures = {"points": points, "total_s": total_s, "share": roof_s / total_s}
    session.results.add("long_answers", figures)
    _add_long_goal(session, "extrapolated", roof_s, total_s)
    if session.is_long:
        done = run_workload(engine, [([1] * 16, OUTPUT)] * 32)
        session.results.add("long_answers", figures | {"whole_s": done.duration_s})
        _add_long_goal(session, "whole", roof_s, done.duration_s)


def _add_long_goal(session: Session, method: str, roof_s: float, total_s: float) -> None:
    """The goal of 0.56 is 110 s on an H200, whose roof is 62 s."""
    name = f"8b, batch 32, 8 k outputs, {method}"
    session.results.add_goal(name, roof_s / total_s, 0.56, "of roof", label=f"{total_s:.3g} s")


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
    run_workload(engine, mixed_workload(8, low, high, 256, seed=1))  # compiles the kernels
    done = run_workload(engine, workload)
    lengths = [(len(prompt), n_output) for prompt, n_output in workload]
    share = session.top.work_roof_s(SHAPES[name], lengths, 256) / done.duration_s
    figures = {**asdict(done), "tokens_per_s": done.tokens_per_s, "share": share}
    session.results.add("throughput", figures)
    session.results.add_goal(
        f"{n} requests, in/out U({low}, {high}), 0.6b", share, 0.42, "of roof",
        label=f"{done.tokens_per_s:.0f} tok/s",
    )  # fmt: skip
    cpu_ms = (done.plan_s + done.prepare_s) * 1e3
    session.results.add_goal("plan + prepare at 256 sequences", cpu_ms, 0.3, "ms", is_floor=False)


def over_http(session: Session) -> None:
    n, n_prompt, n_output = (256, 128, 512) if not session.is_small else (2, 20, 8)
    name = session.shape("1b")
    engine = build_engine(name, session.place, max_model_len=4096)
    budget = Chunked().token_budget  # the same as in the server's mode
    assert budget != "slo"
    run_workload(engine, [([1] * n_prompt, 8)] * n, budget)
    alone = run_workload(engine, [([1] * n_prompt, n_output)] * n, budget).tokens_per_s
    del engine
    session.place.release_memory()
    log_dir = session.logs / "steps"
    with server(name, session.place, log_dir, 256 if not session.is_small else 8) as url:
        send_requests(url, [(0.0, n_prompt, 8)] * n)
        served = tokens_per_s(send_requests(url, [(0.0, n_prompt, n_output)] * n))
        share = served / alone
        session.results.add("http", {"alone": alone, "served": served, "share": share})
        session.results.add_goal(
            "HTTP path against the engine alone, 256 streams, 1b", share, 0.95,
            label=f"{served:.0f} tok/s",
        )  # fmt: skip
        rate = 0.6 * served / 150 if not session.is_small else 2.0
        duration_s, longest = (8.0, 3500) if not session.is_small else (1.0, 300)
        modes = compared_modes(url, rate, duration_s, longest)
    session.results.add("modes", {"rate_per_s": rate, "of": modes})
    for mode, row in modes.items():
        print(mode, {key: round(value, 4) for key, value in row.items()})


def peers(session: Session) -> None:
    """`generate_batch`, which has a goal, and `generate`, at the contexts of our own steps."""
    n_rows = session.place.rows(32)
    figures: dict[str, Any] = {}
    try:
        peer = Peer(session.shape("8b"), session.place)
    except ImportError as error:
        session.results.add("transformers", {"not run": str(error)})
        if not session.is_rehearsal:
            raise
        print(f"not rehearsed: {error}")
        return
    figures |= {"version": peer.version, "attention": peer.attention}
    our_steps = session.results.figures.get("long_answers", {}).get("points", {})
    peer_steps: dict[int, float] = {}
    for context in CONTEXTS:
        n_new = _n_steps(session, peer_steps, context)

        def batch_s(n_new: int = n_new, context: int = context) -> float:
            return peer.generate_batch_step_s(
                n_rows, (context - n_new) // session.place.scale, n_new
            )

        step_s = _try_peer(session, figures, f"generate_batch, {n_new} steps to {context}", batch_s)
        figures |= peer.resolved
        if step_s is not None:
            peer_steps[context - n_new // 2] = step_s
    if our_steps and len(peer_steps) == len(CONTEXTS):
        total_s = extrapolated_s(peer_steps, OUTPUT)
        ratio = total_s / extrapolated_s(our_steps, OUTPUT)
        figures |= {"generate_batch, extrapolated": total_s, "ratio": ratio}
        session.results.add_goal(
            "generate_batch / ours, 8b × 32, 8 k outputs, extrapolated", ratio, 2.0,
            label=f"{total_s:.3g} s; graphs {figures.get('cuda graphs')}, "
            f"async {figures.get('async batching')}, {figures.get('paged attention')}",
        )  # fmt: skip
    for context in CONTEXTS:
        n_new = 4 if session.is_small else _MIN_STEPS

        def static_s(n_new: int = n_new, context: int = context) -> float:
            return peer.generate_step_s(n_rows, (context - n_new) // session.place.scale, n_new)

        _try_peer(session, figures, f"generate, {n_new} steps to {context}", static_s)
    session.results.add("transformers", figures)


def _n_steps(session: Session, peer_steps: Mapping[int, float], context: int) -> int:
    """The number of the peer's steps to time: as many as ours, but fewer if they would take too
    long. The estimate is the last measured step, scaled by the ratio of the contexts."""
    if session.is_small:
        return 4
    if session.is_long or not peer_steps:
        return N_STEPS
    before = max(peer_steps)
    n = int(_PEER_S / (peer_steps[before] * context / before))
    return max(_MIN_STEPS, min(N_STEPS, n))


def _try_peer(
    session: Session, figures: dict[str, Any], name: str, work: Callable[[], float]
) -> float | None:
    """A figure of the peer; if it fails, the reason is recorded as a failure of the suite."""
    try:
        figures[name] = work()
    except Exception as error:
        figures[name] = f"failed: {type(error).__name__}: {error}"
        session.results.failures[f"transformers, {name}"] = figures[name]
        return None
    finally:
        session.results.add("transformers", figures)
    return float(figures[name])
