"""Page of a sizing: the answer, the way from a capacity to replicas, and other assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadgen.measure.wording import format_value
from loadgen.studies.size.result import Size, goodput_text, interval_text, margin_text
from loadgen.workload.scenario import Scenario
from reports.charts import Spec, axis, figure, layer, number, series_color
from reports.page import render_page
from reports.redaction import redact, redacted_command

TRIAL_HEAD = ("router", "replicas", "verdict", "lowest share", "SLO met, by schedule")


def render(
    result: Size, scenario: Scenario, command: Sequence[str], cache_dir: Path | None = None
) -> str:
    """The page of size.json. `cache_dir` caches the plotting bundle."""
    return render_page(
        "size.html.j2",
        {"trials": trials(result)} if len(result.trials) > 1 else {},
        cache_dir,
        result=result,
        scenario=scenario.name,
        headline=headline(result),
        tone="met" if result.n_replicas is not None else "missed",
        lead=lead(result),
        steps=next_steps(result),
        computed=computation(result),
        configurations=configuration_rows(result),
        trial_head=TRIAL_HEAD,
        trial_rows=trial_rows(result),
        costs=cost_rows(result),
        notes=[redact(note) for note in result.notes],
        command=redacted_command(command),
        scenario_text=redact(scenario.to_yaml()),
    )


def headline(result: Size) -> str:
    """`36 GPUs: 9 replicas of 4`."""
    if result.n_replicas is None:
        most = max(trial.n_replicas for trial in result.trials)
        return f"No answer: up to {most} replicas miss the SLO"
    gpus, each = result.n_gpus, result.demand.gpus_per_replica
    return f"{gpus} GPU{'' if gpus == 1 else 's'}: {_replicas(result.n_replicas)} of {each}"


def lead(result: Size) -> list[str]:
    """The demand that the answer serves, and what it rests on."""
    demand, serving = result.demand, result.n_serving
    lines = [
        f"Peak {demand.peak_per_s:.4g} req/s and {100 * demand.headroom:g} % headroom:"
        f" {demand.design_per_s:.4g} req/s; {_replicas(demand.survive)} may fail at the peak."
    ]
    if result.configurations:
        order = result.configurations
        lines.append(
            f"Best of {len(order)} configurations: {order[0].settings}; {margin_text(order)}."
        )
    if serving is None:
        return lines
    if result.trials:
        added = serving - result.n_divided
        bursts = f"; {added} of them for bursts and routing" if added else ""
        lines.append(f"{_replicas(serving)} serve it under every simulated schedule{bursts}.")
    else:
        lines.append(f"{_replicas(serving)} serve it by division; bursts were not simulated.")
    return lines


def next_steps(result: Size) -> list[str]:
    """The step that makes the answer surer."""
    if result.n_replicas is None:
        return [
            "Relax the SLO or lower --attainment, search the capacity for longer, or try"
            " another --router."
        ]
    if not result.trials:
        return [
            "Add --hardware FILE: it simulates bursts and routing, which the division leaves out."
        ]
    return [
        f"Check it on the real replicas: slobench run with --rate {result.demand.peak_per_s:.4g}"
        " against their router, and again with one replica stopped."
    ]


def computation(result: Size) -> list[tuple[str, str]]:
    """The steps from the capacity to the answer: (step, how)."""
    demand, low = result.demand, result.capacity.low
    steps = [
        ("capacity of a replica", f"{interval_text(result.capacity)}; its lower end counts"),
        (
            "division",
            f"{demand.design_per_s:.4g} req/s / {low:.4g} req/s = {_replicas(result.n_divided)}",
        ),
    ]
    if result.trials:
        found = (
            "none of the numbers tried" if result.n_serving is None else _replicas(result.n_serving)
        )
        steps.append(
            (
                "bursts and routing",
                f"{found} behind {result.router} meet the SLO under every schedule"
                f" (at {result.simulated_per_s:.4g} req/s, in units of the simulated capacity)",
            )
        )
    if result.n_replicas is not None:
        steps += [
            ("failures", f"+ {demand.survive} = {_replicas(result.n_replicas)}"),
            ("GPUs", f"{result.n_replicas} × {demand.gpus_per_replica} = {result.n_gpus}"),
        ]
    return steps


def configuration_rows(result: Size) -> list[tuple[str, ...]]:
    """A row per configuration of a search, the best first: its settings, GPUs, goodput per GPU, how
    many times that the best has, and GPUs at the peak."""
    rows: list[tuple[str, ...]] = []
    for each in result.configurations:
        if each.goodput_per_gpu is None:
            rows.append((each.settings, str(each.gpus), each.reason, "", ""))
            continue
        ratio = each.best_over
        times = "" if ratio is None else f"{ratio.value:.3g}"
        if ratio is not None and ratio.low is not None:
            times += f" [{ratio.low:.3g}, {ratio.high:.3g}]"
        goodput = goodput_text(each.goodput_per_gpu)
        rows.append((each.settings, str(each.gpus), goodput, times, str(each.gpus_at_peak)))
    return rows


def trial_rows(result: Size) -> list[tuple[str, ...]]:
    """A row per simulated number of replicas, in the order of `TRIAL_HEAD`, the router of the
    answer first."""
    return [
        (
            trial.router,
            str(trial.n_replicas),
            "met" if trial.is_met else "missed",
            f"{100 * min(trial.attainments):.2f} %",
            ", ".join(f"{100 * share:.2f} %" for share in trial.attainments),
        )
        for trial in sorted(
            result.trials, key=lambda t: (t.router != result.router, t.router, t.n_replicas)
        )
    ]


def cost_rows(result: Size) -> list[tuple[str, str]]:
    """Goodput, tokens, price and energy with all GPUs at the peak; what is unknown is left out."""
    costs = result.costs
    if costs is None:
        return []
    rows = [
        ("goodput per GPU", f"{costs.goodput_per_gpu_per_s:.3g} req/s"),
        ("input tokens", format_value(costs.input_tokens_per_s, "per_s")),
        ("output tokens", format_value(costs.output_tokens_per_s, "per_s")),
    ]
    if costs.price_per_hour is not None and costs.price_per_million is not None:
        rows += [
            ("price per hour", f"{costs.price_per_hour:.4g}"),
            ("price per million output tokens", f"{costs.price_per_million:.3g}"),
        ]
    if costs.energy_kwh_per_million is not None:
        energy = f"{costs.energy_kwh_per_million:.3g} kWh (GPUs)"
        rows.append(("energy per million output tokens", energy))
    return rows


def trials(result: Size) -> Spec:
    """The lowest attainment over the schedules against the number of replicas, a line per router;
    dashed: the target."""
    rows = [
        {"router": t.router, "replicas": t.n_replicas, "share": min(t.attainments)}
        for t in result.trials
    ]
    routers = list(dict.fromkeys(trial.router for trial in result.trials))
    shown = {
        "x": axis(
            "replicas", "replicas", axis={"tickMinStep": 1, "format": "d"}, scale={"zero": False}
        ),
        "y": axis("share", "SLO met, lowest share", axis={"format": ".0%"}, scale={"zero": False}),
        "color": series_color(routers, "router"),
        "tooltip": [{"field": "router"}, {"field": "replicas"}, number("share", "met", ".2%")],
    }
    layers = [
        layer({"type": "line"}, shown, rows),
        layer({"type": "point", "filled": True, "size": 70}, shown, rows),
        layer(
            {"type": "rule", "strokeDash": [6, 3]},
            {"y": {"field": "share", "type": "quantitative"}},
            [{"share": result.target}],
        ),
    ]
    return figure("Attainment by number of replicas and router", layer=layers)


def _replicas(n: int) -> str:
    return f"{n} replica{'' if n == 1 else 's'}"
