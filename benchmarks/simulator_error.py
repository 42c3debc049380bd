"""Predicts published speeds with the simulator, and writes the errors as a page.

    python benchmarks/simulator_error.py [--only SOURCE] [--write]
    python benchmarks/simulator_error.py --page   # docs/simulator-error.md from the last result

`benchmarks/published/speeds.json` holds the published figures with their sources and conditions.
Each is predicted by the preset of its hardware, without a calibration. `--write` keeps the
predictions in `benchmarks/results/simulator_error.json` and writes the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

import numpy as np

from loadgen.lab.simulate import simulate
from loadgen.measure.per_request import per_request
from loadgen.records import Run
from reference_engine.model.hardware_file import simulated_model
from reference_engine.model.zoo import resolve
from reference_engine.state.cost_model import StepCost, StepShape, find_hardware

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "benchmarks" / "published" / "speeds.json"
RESULTS = ROOT / "benchmarks" / "results" / "simulator_error.json"
PAGE = ROOT / "docs" / "simulator-error.md"
_WARMUP_S, _MEASURE_S = 300, 1500  # of a closed loop
_MOST_IN_FLIGHT = 30_000


@dataclass(frozen=True)
class Figure:
    """A published figure and its prediction, in `unit`; `case` states what was measured."""

    source: str
    case: str
    unit: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.published - 1


Table = Mapping[str, Any]
Rows = Iterator[tuple[str, str, float, float]]  # case, unit, published, predicted


def burst(table: Table) -> Rows:
    """Output tokens/s of equal requests that are sent at once, until the last token."""
    for n_input, n_output, n_requests, published in table["rows"]:
        run = _burst(table, n_input, n_output, n_requests)
        speed = n_requests * n_output / float(run.request_rows["last_token_s"].max())
        yield _lengths(table, n_input, n_output), "tokens/s", published, speed


def batch(table: Table) -> Rows:
    """Milliseconds until the last token of a few equal requests that are sent at once."""
    for n_input, n_output, n_requests, published in table["rows"]:
        run = _burst(table, n_input, n_output, n_requests)
        case = f"{_lengths(table, n_input, n_output)}, batch of {n_requests}"
        yield case, "ms", published, 1e3 * float(run.request_rows["last_token_s"].max())


def closed_loop(table: Table) -> Rows:
    """Mean TTFT and ITL (ms) and output tokens/s with so many requests in flight."""
    for n_input, n_output, n_users, *published in table["rows"]:
        phases = {"warmup": f"{_WARMUP_S}s", "measure": f"{_MEASURE_S}s"}
        arrivals = {"kind": "users", "users": n_users, "think": "0s"}
        run = _run(table, n_input, n_output, arrivals, phases)
        times, released_s = per_request(run), run.request_rows["released_s"]
        last_s = run.request_rows["last_token_s"]
        within = (released_s >= _WARMUP_S) & np.isfinite(times.tpot_s)
        n_ended = int(((last_s >= _WARMUP_S) & (last_s < _WARMUP_S + _MEASURE_S)).sum())
        values = (
            1e3 * float(times.ttft_s[within].mean()),
            1e3 * float(times.tpot_s[within].mean()),
            n_ended * n_output / _MEASURE_S,
        )
        case = f"{_lengths(table, n_input, n_output)}, {n_users} in flight"
        names, units = ("TTFT", "ITL", "speed"), ("ms", "ms", "tokens/s")
        for name, unit, theirs, ours in zip(names, units, published, values, strict=True):
            yield f"{case}: {name}", unit, theirs, ours


def decode_step(table: Table) -> Rows:
    """Milliseconds of a step of decodes at given contexts."""
    cost = _cost(table)
    for groups, published in table["rows"]:
        n = sum(n_rows for n_rows, _ in groups)
        n_context = sum(n_rows * context for n_rows, context in groups)
        contexts = " + ".join(f"{n_rows} × {context}" for n_rows, context in groups)
        predicted = 1e3 * cost.estimate(StepShape(n, 0, 0.0, n, n_context))
        yield f"{_model(table)}, {contexts} tokens of context", "ms", published, predicted


def decode_attention(table: Table) -> Rows:
    """Microseconds of the attention of decodes in a layer."""
    layer_s = _cost(table).context_token_s / resolve(table["shape"]).config.n_layers
    for n_rows, context, published in table["rows"]:
        case = f"{_model(table)}, {n_rows} × {context} tokens of context"
        yield case, "µs", published, 1e6 * layer_s * n_rows * context


def prompt_attention(table: Table) -> Rows:
    """Microseconds of the attention of a prompt in a layer."""
    layer_s = _cost(table).prefill_attention_s / resolve(table["shape"]).config.n_layers
    for n_tokens, published in table["rows"]:
        yield (
            f"{_model(table)}, prompt of {n_tokens}",
            "µs",
            published,
            1e6 * layer_s * n_tokens * n_tokens / 2,
        )


def linear_layer(table: Table) -> Rows:
    """Milliseconds of the matrices of a layer, by tokens."""
    cost, hardware = _cost(table), find_hardware(table["hardware"])
    bare = StepCost(weights_s=cost.weights_s, token_s=cost.token_s)
    n_layers = resolve(table["shape"]).config.n_layers
    for n_tokens, published in table["rows"]:
        layer_s = bare.estimate(StepShape(0, n_tokens)) / n_layers + hardware.layer_s
        yield f"{_model(table)}, {n_tokens} tokens", "ms", published, 1e3 * layer_s


KINDS: Mapping[str, tuple[str, Callable[[Table], Rows]]] = {
    "burst": ("All requests at once: output tokens/s", burst),
    "batch": ("A fixed batch: time until all have ended", batch),
    "closed_loop": ("Closed loop", closed_loop),
    "decode_step": ("A step of decodes", decode_step),
    "decode_attention": ("Attention of decodes, a layer", decode_attention),
    "prompt_attention": ("Attention of a prompt, a layer", prompt_attention),
    "linear_layer": ("Matrices of a layer", linear_layer),
}


def _burst(table: Table, n_input: int, n_output: int, n_requests: int) -> Run:
    arrivals = {"kind": "burst", "requests": n_requests}
    return _run(table, n_input, n_output, arrivals, {"measure": "24h"})


def _run(
    table: Table,
    n_input: int,
    n_output: int,
    arrivals: Mapping[str, object],
    phases: Mapping[str, str],
) -> Run:
    """A run of equal requests on the simulated engine of a table."""
    return simulate(
        "offline_batch",
        settings={
            "arrivals": arrivals,
            "requests": {"input_tokens": n_input, "output_tokens": n_output},
            "phases": phases,
            "limits": {"timeout": "24h", "max_concurrency": _MOST_IN_FLIGHT},
        },
        shape=table["shape"],
        hardware=table["hardware"],
        prefix_cache=False,
        **table.get("engine", {}),
    )


def _cost(table: Table) -> StepCost:
    return simulated_model(resolve(table["shape"]), table["hardware"]).cost


def _model(table: Table) -> str:
    return f"{table['shape']} on {table['hardware']}"


def _lengths(table: Table, n_input: int, n_output: int) -> str:
    return f"{_model(table)}, {n_input} + {n_output} tokens"


def predicted(published: Mapping[str, Any], only: str | None = None) -> Iterator[Figure]:
    """The figures of all tables, or of those of a source."""
    for table in published["tables"]:
        if only in (None, table["source"]):
            _, rows = KINDS[table["kind"]]
            for row in rows(table):
                figure = Figure(table["source"], *row)
                print(
                    f"{figure.case}: {figure.published:g} {figure.unit} published, "
                    f"{figure.predicted:.5g} predicted, {figure.error:+.1%}",
                    file=sys.stderr,
                )
                yield figure


PREFACE = """\
# How wrong is the simulator?

Made by `python benchmarks/simulator_error.py --write` from `benchmarks/published/speeds.json`. The
simulator predicts published speeds by the presets of its hardware, `h100` and `h200`, without a
[calibration](calibrate.md). A calibration of your own server is more accurate: [its
errors](calibrate.md#the-error-of-the-costs) are below 8 %, or the file is refused. Every published
figure is here, also those that the simulator misses.

A positive error of a speed means that the simulator promises too much; a positive error of a time
means that it is too slow. A factor of 2 is +100 % or −50 %.
"""

COLUMNS = """\
The median is that of the absolute errors. In order are the pairs of figures of a unit of which
the simulator, too, predicts the larger to be the larger.
"""

LEFT_OUT = """\
## What the errors say

- **Order is safer than size.** The speed of a server depends on its software, which a preset does
  not have: idle time between steps, the attention backend, the largest batch. Calibrate before you
  buy.
- **KV in 8 bits is read too slowly.** The simulator stores it in half the memory, and reads it as
  slowly as bfloat16, because the bundled engine reads it more slowly ([on a GPU](gpu.md)).
  Speeds with long contexts are therefore too low.
- **A TTFT has no HTTP, tokenizer or server queue.** At a low load it is too short.
- **Attention of a few short requests is too fast.** A kernel has a least time, about 25 µs on an
  H100, which the preset counts per layer, together with the other kernels.
- **Not compared:** MLPerf Inference. Its submissions of 2026 that were read run in FP4 on hardware
  without a preset here, on data whose lengths the results do not state.
"""


def in_order(figures: Sequence[Figure]) -> float:
    """The share of the pairs with one unit and different published values that are predicted in
    the published order; 1 without such a pair."""
    pairs = [
        (a.published - b.published) * (a.predicted - b.predicted) > 0
        for a, b in combinations(figures, 2)
        if a.unit == b.unit and a.published != b.published
    ]
    return sum(pairs) / len(pairs) if pairs else 1.0


def page(published: Mapping[str, Any], figures: Sequence[Figure]) -> str:
    """docs/simulator-error.md."""
    lines = [
        PREFACE,
        "## Summary",
        "",
        "| source | figures | median error | worst | in order |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, source in published["sources"].items():
        own = [figure for figure in figures if figure.source == name]
        middle = median(abs(figure.error) for figure in own)
        worst = max(own, key=lambda figure: abs(figure.error))
        order = f"{100 * in_order(own):.0f} %"
        errors = f"{100 * middle:.0f} % | {_percent(worst.error)}"
        lines.append(f"| {source['title']} | {len(own)} | {errors} | {order} |")
    lines += ["", COLUMNS, LEFT_OUT]
    for name, source in published["sources"].items():
        own = [figure for figure in figures if figure.source == name]
        lines += [
            f"## {source['title']}",
            "",
            _filled(source["conditions"]),
        ]
        if source["assumed"]:
            lines += ["", _filled(f"Assumed: {source['assumed']}")]
        link = source["url"]
        lines += ["", f"Source: <{link}>" if "://" in link else f"Source: [its result]({link})", ""]
        lines += ["| case | published | predicted | error |", "|---|--:|--:|--:|"]
        for figure in own:
            lines.append(
                f"| {figure.case} | {_number(figure.published)} {figure.unit} "
                f"| {_number(figure.predicted)} {figure.unit} | {_percent(figure.error)} |"
            )
        lines.append("")
    return "\n".join(lines)


def _filled(text: str) -> str:
    return fill(text, 100, break_on_hyphens=False)


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if value >= 1000 else f"{value:.3g}"


def _percent(error: float) -> str:
    return f"{100 * error:+.0f} %".replace("-", "−")


def read_figures() -> list[Figure]:
    """The figures of the last result."""
    return [Figure(**row) for row in json.loads(RESULTS.read_text())["figures"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    published = json.loads(PUBLISHED.read_text())
    parser.add_argument("--only", choices=[*published["sources"]], help="the figures of a source")
    parser.add_argument("--write", action="store_true", help="keep the result and write the page")
    parser.add_argument("--page", action="store_true", help="write the page of the last result")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write needs the figures of all sources")
    figures = read_figures() if options.page else list(predicted(published, options.only))
    if options.write:
        rows = [asdict(figure) for figure in figures]
        RESULTS.write_text(json.dumps({"figures": rows}, indent=1, ensure_ascii=False) + "\n")
    if options.write or options.page:
        PAGE.write_text(page(published, figures), encoding="utf-8")


if __name__ == "__main__":
    main()
