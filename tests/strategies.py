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


arrivals = st.one_of(
    _spec("constant", rate=rates),
    _spec("poisson", rate=rates),
    _spec("gamma", rate=rates, cv=st.floats(0.05, 5)),
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
    | st.fixed_dictionaries({}, optional={"error_rate": shares, "over": durations}),
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
