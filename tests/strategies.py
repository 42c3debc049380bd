"""Shared hypothesis strategies: scenarios as people write them, and schedules."""

import numpy as np
from hypothesis import strategies as st

from loadgen.records import SCHEDULE

_AMOUNTS = st.integers(1, 9999).map(lambda n: n / 100) | st.floats(1e-3, 1e4)
durations = st.builds(
    "{}{}".format, _AMOUNTS, st.sampled_from(["us", "ms", "s", "m", "min", "h", "d"])
)
rates = st.builds("{}/{}".format, _AMOUNTS, st.sampled_from(["s", "min", "h"]))
shares = st.integers(1, 100).map("{}%".format) | st.floats(0.01, 1.0)
tokens = st.integers(1, 5000)
names = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,20}", fullmatch=True)


def _spec(kind, **parameters):
    return st.fixed_dictionaries({"kind": st.just(kind), **parameters})


def _of_rate(build):
    """Kinds whose durations go with their rate, so that no example asks for a million of either:
    `build` gets the rate, four durations of 1 to 50 mean gaps, and those four numbers."""
    return st.builds(
        lambda rate, parts: build(f"{rate!r}/s", [f"{part / rate!r}s" for part in parts], parts),
        st.floats(0.01, 1000),
        st.lists(st.floats(1, 50), min_size=4, max_size=4),
    )


_levels = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(
    lambda levels: [f"{level}/s" for level in levels]
)
renewals = st.one_of(
    _spec("constant", rate=rates),
    _spec("poisson", rate=rates),
    _spec("gamma", rate=rates, cv=st.floats(0.05, 5)),
    _spec("weibull", rate=rates, shape=st.floats(0.4, 5)),
)
modulated = st.one_of(
    _of_rate(lambda rate, t, _: {"kind": "on_off", "rate": rate, "on": t[0], "off": t[1]}),
    _of_rate(
        lambda rate, t, parts: {
            "kind": "on_off",
            "rate": rate,
            "on": t[0],
            "off": t[1],
            "sojourn": "pareto",
            "alpha": 1 + parts[2] / 20,
        }
    ),
    _of_rate(
        lambda rate, t, parts: {
            "kind": "mmpp",
            "rate": rate,
            "states": [
                {"weight_rate": parts[-1 - i], "mean_stay": stay} for i, stay in enumerate(t[:3])
            ],
        }
    ),
    _of_rate(
        lambda rate, t, parts: {
            "kind": "hawkes",
            "rate": rate,
            "branching": parts[1] / 60,
            "decay": t[0],
        }
    ),
)
varying = st.one_of(
    st.builds(
        lambda a, b, shape: {"kind": "ramp", "from": a, "to": b, "over": "9s", "shape": shape},
        st.integers(1, 9).map("{}/s".format),
        st.integers(1, 9).map("{}/s".format),
        st.sampled_from(["linear", "exponential"]),
    ),
    _levels.map(lambda r: {"kind": "steps", "levels": [{"rate": x, "for": "5s"} for x in r]}),
    st.builds(
        lambda levels, process: {
            "kind": "curve",
            "points": [{"at": f"{3 * i}s", "rate": x} for i, x in enumerate(levels)],
            **process,
        },
        _levels,
        st.sampled_from(
            [{}, {"process": "constant"}, {"process": "gamma", "cv": 2.0}, {"process": "poisson"}]
        ),
    ),
    _of_rate(
        lambda rate, t, parts: {
            "kind": "diurnal",
            "rate": rate,
            "peak_to_trough": parts[0],
            "period": t[1],
            "peak_at": t[2],
        }
    ),
    st.builds(
        lambda at, rise, decay: {
            "kind": "flash_crowd",
            "rate": "3/s",
            "peak": "20/s",
            "at": f"{at!r}s",
            "rise": f"{rise!r}s",
            "decay": f"{decay!r}s",
        },
        st.floats(0, 60),
        st.floats(0.1, 30),
        st.floats(0.1, 30),
    ),
)
grouped = st.one_of(
    _spec("batch", rate=rates, size=st.integers(1, 20)),
    _spec(
        "batch",
        rate=rates,
        size=st.just({"kind": "lognormal", "median": 3, "sigma": 0.8, "max": 40}),
    ),
    _spec("burst", requests=st.integers(1, 500)),
)
arrivals = st.one_of(
    renewals,
    modulated,
    varying,
    grouped,
    _of_rate(
        lambda rate, _, parts: {
            "kind": "sum",
            "of": [{"kind": "poisson", "rate": rate}, {"kind": "gamma", "rate": rate, "cv": 2.0}],
        }
    ),
)
_bounds = st.tuples(tokens, tokens).map(sorted)
lengths = st.one_of(
    tokens,
    _spec("fixed", tokens=tokens),
    _bounds.map(lambda b: {"kind": "uniform", "min": b[0], "max": b[1]}),
    st.builds(
        lambda median, sigma, b: {
            "kind": "lognormal",
            "median": median,
            "sigma": sigma,
            "min": max(1, median // (1 + b[0])),
            "max": median + b[1],
        },
        tokens,
        st.floats(0.1, 2),
        _bounds,
    ),
    st.builds(
        lambda alpha, b: {"kind": "power_law", "alpha": alpha, "min": b[0], "max": b[1]},
        st.floats(0.1, 4),
        _bounds,
    ),
    st.builds(
        lambda mean, spread, top: {"kind": "normal", "mean": mean, "sd": spread, "max": mean + top},
        tokens,
        st.floats(1, 500),
        tokens,
    ),
    st.builds(
        lambda mean, cv, top: {"kind": "gamma", "mean": mean, "cv": cv, "max": mean + top},
        tokens,
        st.floats(0.1, 2),
        tokens,
    ),
    st.lists(tokens, min_size=1, max_size=9).map(lambda v: {"kind": "empirical", "values": v}),
    st.lists(st.tuples(tokens, st.floats(0.1, 9)), min_size=1, max_size=9).map(
        lambda pairs: {
            "kind": "empirical",
            "values": [value for value, _ in pairs],
            "weights": [weight for _, weight in pairs],
        }
    ),
    st.builds(
        lambda weights, size, b: {
            "kind": "mixture",
            "of": [
                {"weight": weights[0], "kind": "fixed", "tokens": size},
                {"weight": weights[1], "kind": "uniform", "min": b[0], "max": b[1]},
            ],
        },
        st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)),
        tokens,
        _bounds,
    ),
)
_optional_blocks = {
    "seed": st.integers(0, 2**63 - 1),
    "limits": st.fixed_dictionaries(
        {},
        optional={
            "timeout": durations,
            "max_concurrency": st.integers(1, 10_000),
            "when_full": st.sampled_from(["drop", "wait"]),
        },
    ),
    "stop_when": st.just("never")
    | st.fixed_dictionaries(
        {},
        optional={
            "error_rate": shares,
            "over": durations,
            "saturated": st.integers(1, 600).map("{}s".format),
        },
    ),
    "prompts": st.fixed_dictionaries(
        {"kind": st.just("synthetic")}, optional={"salt": st.sampled_from(["run", "none"])}
    ),
    "slo": st.lists(
        st.sampled_from(["ttft <= 500ms", "tpot <= 50ms", "p99(ttft) <= 1.5s", "error_rate <= 1%"]),
        max_size=4,
    ),
    "instrument": st.fixed_dictionaries(
        {},
        optional={
            "lateness": durations,
            "loop_lag": durations,
            "read_backlog": durations,
            "cpu": shares,
            "run_delay": shares,
        },
    ),
}
scenario_mappings = st.fixed_dictionaries(
    {
        "schema": st.just(1),
        "name": names,
        "arrivals": arrivals,
        "requests": st.fixed_dictionaries(
            {"input_tokens": lengths, "output_tokens": lengths},
            optional={
                "temperature": st.floats(0, 2),
                "cancel": st.fixed_dictionaries({"share": shares, "after": durations}),
                "shared_prefix": st.fixed_dictionaries(
                    {"tokens": tokens}, optional={"groups": st.integers(1, 50)}
                ),
            },
        ),
        "phases": st.fixed_dictionaries(
            {"measure": durations}, optional={"warmup": durations, "drain": durations}
        ),
    },
    optional=_optional_blocks,
)
"""What `yaml.safe_load` would give for a valid scenario file."""


@st.composite
def schedules(draw, max_rows=60):
    """Valid schedules with sessions of any size, in any interleaving."""
    n = draw(st.integers(0, max_rows))
    rows = np.zeros(n, SCHEDULE)
    rows["request_id"] = np.arange(n)
    rows["session_id"] = draw(st.lists(st.integers(0, 20), min_size=n, max_size=n))
    rows["scheduled_s"] = np.sort(draw(st.lists(st.floats(0, 100), min_size=n, max_size=n)))
    rows["input_tokens"] = draw(st.lists(tokens, min_size=n, max_size=n))
    rows["prompt_seed"] = draw(st.lists(st.integers(0, 2**64 - 1), min_size=n, max_size=n))
    return rows
