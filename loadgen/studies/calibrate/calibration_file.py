"""From measured steps to a hardware file, and the fit as it is stored and printed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from loadgen.archive import checksums
from loadgen.archive.engine_logs import NAMES
from loadgen.archive.store import read_run
from loadgen.errors import UsageError
from loadgen.manifest.json_section import JsonSection
from loadgen.studies.calibrate.cost_fit import FittedCost, fit_cost
from loadgen.studies.calibrate.lack_of_fit import KindError, SizeError, rows_by_kind
from loadgen.studies.calibrate.run_samples import Answers, answers_of_run, request_s, samples_of_run
from loadgen.studies.calibrate.step_samples import StepSamples, request_outside_s, samples_of_steps
from reference_engine.model.hardware_file import (
    MOST_ERROR,
    read_calibrated,
    write_calibrated,
)
from reference_engine.model.zoo import resolve
from reference_engine.state.cost_model import MeasuredSteps, StepCost
from reference_engine.state.step_variation import StepVariation
from reference_engine.step_log.step_files import read_log

_KV_TOKENS = 1 << 20  # where neither the log nor the user states the server's KV memory


@dataclass(frozen=True)
class Measured:
    """Timed steps and their origin; `kv_tokens` and `request_s` are None where unknown, and
    `answers` for steps of a log."""

    samples: StepSamples
    source: str
    kv_tokens: int | None = None
    request_s: float | None = None
    answers: Answers | None = None


class Calibration(JsonSection, frozen=True, kw_only=True):
    """A fit and the hardware file that holds it, times in seconds; the content of calibrate.json.
    `accepted`: the simulator accepts the file. `form` states the form of the costs in words,
    `by_kind` their errors. `answers` is None for steps of a log."""

    file: str
    accepted: bool
    forced: bool
    n_steps: int
    form: str
    costs: StepCost
    variation: StepVariation
    request_s: float | None
    answers: Answers | None
    by_kind: dict[str, KindError]

    def lines(self) -> Iterator[str]:
        """The fit in words, a line each."""
        cost, variation = self.costs, self.variation
        yield f"{self.n_steps} steps; {self.form}; costs of a step:"
        answers = self.answers or Answers()
        for name, seconds in (
            ("step", cost.step_s),
            ("per sequence", cost.seq_s),
            ("per sequence with a prompt", cost.prefill_seq_s),
            ("per row of a graph", cost.row_s),
            *((f"for each of the first {k}", piece_s) for k, piece_s in cost.seq_pieces),
            ("per token", cost.token_s),
            ("per token, added", cost.added_token_s),
            ("weights", cost.weights_s),
            ("per token of context", cost.context_token_s),
            ("per pair in prompt attention", cost.prefill_attention_s),
        ):
            if seconds:
                yield f"  {name:28} {seconds * 1e6:12.4g} µs"
        if self.request_s is not None:
            yield (
                f"  outside the steps, a request needs {self.request_s * 1e3:.3g} ms (HTTP, "
                "tokenizing), which no simulation includes"
            )
        if answers.n_without_steps:
            yield (
                f"  {answers.n_without_steps} of {answers.n} answers gave no steps, because their "
                "chunks do not hold a token each"
            )
        if answers.n_failed:
            yield f"  {answers.n_failed} requests failed and gave no steps"
        yield (
            f"  equal steps differ: the fastest {variation.up_to[0]:.0%} take "
            f"{variation.ratio[0]:.2f} times their cost, the slowest {variation.ratio[-1]:.2f}"
        )
        if variation.pause_s:
            mean_ms = 1e3 * sum(variation.pause_s) / len(variation.pause_s)
            yield f"  {variation.pausing:.2%} of the steps pause for {mean_ms:.2g} ms on average"
        yield "error of the costs (mean of the sizes, 95 % interval), and at the worst size:"
        for kind, error in self.by_kind.items():
            yield f"  {kind:8} {_error_text(error)}"
        for steps in cost.measured:
            yield f"  measured {steps.kind} steps: {_sizes_text(steps)}"
        if not self.accepted:
            yield (
                f"{self.file} is refused by the simulator: its costs are wrong by more than "
                f"{MOST_ERROR:.0%}; measure longer on an idle machine, or accept the error with "
                "--force"
            )


def measured_log(directory: Path) -> Measured:
    """The steps in an engine's `--log-dir` or in the directory of a run of the bundled engine.
    Raises UsageError for a directory without a log."""
    checksums.check_read(directory, *NAMES)
    log = read_log(directory)
    starts = [event.detail for event in log.events if event.kind == "start"]
    kv_tokens = None
    if starts:
        kv_tokens = log.setup.n_blocks * log.setup.block_tokens
    outside_s = None
    if (directory / "requests.parquet").is_file():
        run = read_run(directory)
        outside_s = request_outside_s(run, log)
        if outside_s is None:
            outside_s = request_s(run)
    samples = samples_of_steps(log.steps)
    return Measured(samples, f"steps in {directory}", kv_tokens, outside_s)


def measured_run(directory: Path) -> Measured:
    """The steps that the client saw in a recorded run of any server. Raises UsageError for a
    simulated run, or for a directory without a run."""
    run = read_run(directory)
    if run.manifest.clock == "virtual":
        raise UsageError(f"--run {directory}: a simulated run has the simulator's own costs")
    answers = answers_of_run(run)
    return Measured(samples_of_run(run), f"run {directory}", None, request_s(run), answers)


def calibrated(
    measured: Measured,
    path: Path,
    shape: str,
    kv_tokens: int | None = None,
    *,
    is_forced: bool = False,
) -> Calibration:
    """Fits the costs and writes them to `path`. Raises UsageError for a shape that does not exist,
    for too few steps, and for a file at `path` that holds anything else than a calibration."""
    name = resolve(shape).name
    check_place(path, shape)
    fitted = fit_cost(measured.samples)
    if fitted.request_s is None:
        fitted = replace(fitted, request_s=measured.request_s)
    facts: dict[str, object] = {
        "name": path.stem,
        "model": name,
        "kv_tokens": kv_tokens or measured.kv_tokens or _KV_TOKENS,
        "source": measured.source,
        "n_steps": fitted.n_steps,
        "form": fitted.form.sentence(),
    }
    if is_forced:
        facts["forced"] = True
    path.parent.mkdir(parents=True, exist_ok=True)
    cost = replace(fitted.cost, measured=measured_sizes(measured.samples))
    write_calibrated(path, cost, fitted.request_s, facts, fitted.variation, _stated_errors(fitted))
    return Calibration(
        file=str(path),
        accepted=is_forced or fitted.is_right,
        forced=is_forced,
        n_steps=fitted.n_steps,
        form=fitted.form.sentence(),
        costs=cost,
        variation=fitted.variation,
        request_s=fitted.request_s,
        answers=measured.answers,
        by_kind=dict(fitted.by_kind),
    )


def check_place(path: Path, shape: str) -> None:
    """Raises UsageError for a shape that does not exist, and unless `path` is the name of a new
    YAML file, or of an earlier calibration."""
    resolve(shape)
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--out {path}: the name of a hardware file ends in .yaml")
    if not path.exists():
        return
    try:
        read_calibrated(path)
    except UsageError:
        raise UsageError(f"--out {path}: exists and holds no calibration") from None


def measured_sizes(samples: StepSamples) -> tuple[MeasuredSteps, ...]:
    """The sizes of the steps of each kind, least and most."""

    def ranges(part: StepSamples) -> dict[str, tuple[int, int]]:
        columns = {
            "prompts": part.n_prefill,
            "prompt_tokens": part.prefill_tokens,
            "prompt_attention": part.prefill_attention,
            "decodes": part.n_decode,
            "context_tokens": part.context_tokens,
        }
        return {name: (int(v.min()), math.ceil(v.max())) for name, v in columns.items()}

    kinds = rows_by_kind(samples).items()
    return tuple(MeasuredSteps(kind, **ranges(samples.at(rows))) for kind, rows in kinds)


def _stated_errors(fitted: FittedCost) -> dict[str, dict[str, object]]:
    return {
        kind: {
            "mean": float(f"{error.error:.3g}"),
            "interval": [float(f"{error.low:.3g}"), float(f"{error.high:.3g}")],
            "worst": float(f"{error.worst.error:.3g}"),
            "at": json.dumps(_size_text(error.worst)),
        }
        for kind, error in fitted.by_kind.items()
    }


def _error_text(error: KindError) -> str:
    worst = error.worst
    return (
        f"{error.error:5.1%} ({error.low:.1%} to {error.high:.1%}); {worst.error:+.1%} at "
        f"{_size_text(worst)}; {error.n} steps, which differ by {error.scatter:.1%}, bias "
        f"{error.bias:+.1%}"
    )


def _size_text(size: SizeError) -> str:
    if size.by == "time":
        return f"{size.least:.0%} to {size.most:.0%} of the time"
    words = {
        "prompt_tokens": "prompt tokens",
        "sequences": "decodes",
        "context": "tokens of context each",
    }[size.by]
    return f"{size.least:.0f} to {size.most:.0f} {words}"


def _sizes_text(steps: MeasuredSteps) -> str:
    ranges = {
        "prompts": steps.prompts,
        "prompt tokens": steps.prompt_tokens,
        "decodes": steps.decodes,
        "tokens of context": steps.context_tokens,
    }
    return ", ".join(f"{least} to {most} {name}" for name, (least, most) in ranges.items() if most)
