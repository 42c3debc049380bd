"""The parts of the GPU suite that measure: each adds its figures, and its goals, which are shares
of the ceilings measured in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from reference_engine.model.zoo import SHAPES
from reference_engine.policies.chunked import Chunked
from rig.gpu_ceilings import ceilings
from rig.gpu_engine import Built, built, decode_step_s, mixed_work, worked
from rig.gpu_kernels import all_kernels
from rig.gpu_peer import Peer
from rig.gpu_server import answered, compared_modes, server, tokens_per_s
from rig.gpu_session import Session

CONTEXTS = (1024, 4096, 8192)
OUTPUT = 8192
N_STEPS = 512  # timed at each context, ending there
_PEER_S = 40.0  # for theirs at a context, unless it is a long run
_FEWEST_STEPS = 64


def measure_ceilings(session: Session) -> None:
    session.top = ceilings(session.place)
    session.results.keep("ceilings", asdict(session.top))
    print(
        f"copy {session.top.copy_bytes_per_s / 1e12:.2f} TB/s, "
        f"matmul {session.top.matmul_flops / 1e12:.0f} TFLOP/s"
    )


def kernels(session: Session) -> None:
    config = SHAPES[session.shape("8b")]
    timed = all_kernels(session.ops(), config, session.place, session.top)
    session.results.keep("kernels", [asdict(one) for one in timed])
    for one in timed:
        print(
            f"{one.kernel:18} {one.case:28} {one.seconds * 1e6:9.1f} µs {one.share:7.1%} {one.of}"
        )
        if one.kernel == "decode attention" and not one.case.startswith("batch 1,"):
            session.results.aim(f"decode attention, {one.case}", one.share, 0.75, "of copy")


def decode_steps(session: Session) -> None:
    rows: list[dict[str, Any]] = []
    for name in ("0.6b", "8b"):
        engine = built(session.shape(name), session.place)
        config, context = SHAPES[session.shape(name)], 1024 // session.place.scale
        for n_rows in (1, 32, 256):
            seconds = decode_step_s(engine, session.place.rows(n_rows), context)
            share = session.top.decode_roof_s(config, n_rows, context) / seconds
            row = {"shape": name, "rows": n_rows, "context": context, "seconds": seconds}
            rows.append(row | {"share": share})
            session.results.keep("decode_steps", rows)
            print(f"{name} × {n_rows}: {seconds * 1e3:.3f} ms, {share:.1%} of roof")
            if n_rows > 1:
                session.results.aim(
                    f"decode step {name}, batch {n_rows}", share, 0.6, "of roof",
                    label=f"{seconds * 1e3:.3g} ms",
                )  # fmt: skip
        if name == "8b":
            _long_answers(session, engine)
        del engine
        session.place.give_back()


def _long_answers(session: Session, engine: Built) -> None:
    """Batch 32, 8 k outputs: steps before three contexts and what lies between them."""
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
    found = {"points": points, "total_s": total_s, "share": roof_s / total_s}
    session.results.keep("long_answers", found)
    _aim_long_answers(session, "extrapolated", roof_s, total_s)
    if session.is_long:
        done = worked(engine, [([1] * 16, OUTPUT)] * 32)
        session.results.keep("long_answers", found | {"whole_s": done.duration_s})
        _aim_long_answers(session, "whole", roof_s, done.duration_s)


def _aim_long_answers(session: Session, how: str, roof_s: float, total_s: float) -> None:
    """62 s of roof on an H200 in 110."""
    name = f"8b, batch 32, 8 k outputs, {how}"
    session.results.aim(name, roof_s / total_s, 0.56, "of roof", label=f"{total_s:.3g} s")


def extrapolated_s(step_s: Mapping[int, float], n_steps: int) -> float:
    """Seconds of steps at contexts 1 … n_steps from a few of them: a straight line between
    neighbours, the nearest one outside."""
    contexts = sorted(step_s)
    steps = np.interp(np.arange(1, n_steps + 1), contexts, [step_s[c] for c in contexts])
    return float(steps.sum())


def throughput(session: Session) -> None:
    low, high, n = (100, 1024, 256) if not session.is_small else (4, 20, 8)
    name = session.shape("0.6b")
    engine = built(name, session.place)
    work = mixed_work(n, low, high, SHAPES[name].vocab_size)
    worked(engine, mixed_work(8, low, high, 256, seed=1))  # compiles what is not compiled yet
    done = worked(engine, work)
    lengths = [(len(prompt), n_output) for prompt, n_output in work]
    share = session.top.work_roof_s(SHAPES[name], lengths, 256) / done.duration_s
    found = {**asdict(done), "tokens_per_s": done.tokens_per_s, "share": share}
    session.results.keep("throughput", found)
    session.results.aim(
        f"{n} requests, in/out U({low}, {high}), 0.6b", share, 0.42, "of roof",
        label=f"{done.tokens_per_s:.0f} tok/s",
    )  # fmt: skip
    cpu_ms = (done.plan_s + done.prepare_s) * 1e3
    session.results.aim("plan + prepare at 256 sequences", cpu_ms, 0.3, "ms", is_floor=False)


def over_http(session: Session) -> None:
    n, n_prompt, n_output = (256, 128, 512) if not session.is_small else (2, 20, 8)
    name = session.shape("1b")
    engine = built(name, session.place, max_model_len=4096)
    budget = Chunked().token_budget  # of the server's mode, too
    assert budget != "slo"
    worked(engine, [([1] * n_prompt, 8)] * n, budget)
    alone = worked(engine, [([1] * n_prompt, n_output)] * n, budget).tokens_per_s
    del engine
    session.place.give_back()
    log_dir = session.logs / "steps"
    with server(name, session.place, log_dir, 256 if not session.is_small else 8) as url:
        answered(url, [(0.0, n_prompt, 8)] * n)
        served = tokens_per_s(answered(url, [(0.0, n_prompt, n_output)] * n))
        share = served / alone
        session.results.keep("http", {"alone": alone, "served": served, "share": share})
        session.results.aim(
            "HTTP path against the engine alone, 256 streams, 1b", share, 0.95,
            label=f"{served:.0f} tok/s",
        )  # fmt: skip
        rate = 0.6 * served / 150 if not session.is_small else 2.0
        duration_s, longest = (8.0, 3500) if not session.is_small else (1.0, 300)
        modes = compared_modes(url, rate, duration_s, longest)
    session.results.keep("modes", {"rate_per_s": rate, "of": modes})
    for mode, row in modes.items():
        print(mode, {key: round(value, 4) for key, value in row.items()})


def peers(session: Session) -> None:
    """`generate_batch`, which is judged, and `generate` at the contexts of our own steps."""
    n_rows = session.place.rows(32)
    found: dict[str, Any] = {}
    try:
        peer = Peer(session.shape("8b"), session.place)
    except ImportError as error:
        session.results.keep("transformers", {"not run": str(error)})
        if not session.is_rehearsal:
            raise
        print(f"not rehearsed: {error}")
        return
    found |= {"version": peer.version, "attention": peer.attention}
    ours = session.results.found.get("long_answers", {}).get("points", {})
    theirs: dict[int, float] = {}
    for context in CONTEXTS:
        n_new = _n_steps(session, theirs, context)

        def batch_s(n_new: int = n_new, context: int = context) -> float:
            return peer.generate_batch_step_s(
                n_rows, (context - n_new) // session.place.scale, n_new
            )

        step_s = _tried(session, found, f"generate_batch, {n_new} steps to {context}", batch_s)
        found |= peer.resolved
        if step_s is not None:
            theirs[context - n_new // 2] = step_s
    if ours and len(theirs) == len(CONTEXTS):
        total_s = extrapolated_s(theirs, OUTPUT)
        ratio = total_s / extrapolated_s(ours, OUTPUT)
        found |= {"generate_batch, extrapolated": total_s, "ratio": ratio}
        session.results.aim(
            "generate_batch / ours, 8b × 32, 8 k outputs, extrapolated", ratio, 2.0,
            label=f"{total_s:.3g} s; graphs {found.get('cuda graphs')}, "
            f"async {found.get('async batching')}, {found.get('paged attention')}",
        )  # fmt: skip
    for context in CONTEXTS:
        n_new = 4 if session.is_small else _FEWEST_STEPS

        def static_s(n_new: int = n_new, context: int = context) -> float:
            return peer.generate_step_s(n_rows, (context - n_new) // session.place.scale, n_new)

        _tried(session, found, f"generate, {n_new} steps to {context}", static_s)
    session.results.keep("transformers", found)


def _n_steps(session: Session, theirs: Mapping[int, float], context: int) -> int:
    """As many as ours; fewer where, by the step before, they would take too long: a step takes at
    most as many times longer as its context is."""
    if session.is_small:
        return 4
    if session.is_long or not theirs:
        return N_STEPS
    before = max(theirs)
    n = int(_PEER_S / (theirs[before] * context / before))
    return max(_FEWEST_STEPS, min(N_STEPS, n))


def _tried(
    session: Session, found: dict[str, Any], name: str, work: Callable[[], float]
) -> float | None:
    """Theirs to fail: kept with its reason, and exits 1."""
    try:
        found[name] = work()
    except Exception as error:
        found[name] = f"failed: {type(error).__name__}: {error}"
        session.results.failures[f"transformers, {name}"] = found[name]
        return None
    finally:
        session.results.keep("transformers", found)
    return float(found[name])
