"""The self-report of a load process, from a broken or malicious worker."""

import math

import pytest

from loadgen.web.control_messages import Bad
from loadgen.web.validate import read_self_report


def self_report(shard=0, broken=""):
    """A report as `Shard.finish` returns it."""
    return {
        "shard": shard, "broken": broken, "window_s": 4.0, "cpu_share": 0.1,
        "run_delay_share": 0.0, "throttled_share": None, "stolen_share": None,
        "cores": {"allowed": [0, 1], "online": 2, "own_s": 0.4, "idle_s": 7.0, "programs_s": 0.9,
                  "total_s": 8.0, "most_stolen_s": 0.0},
        "loop_lag_s": {"n": 100, "p50": 1e-5, "p99": 1e-4, "max": 1e-3},
        "stalls": {"over_s": 0.05, "spans_s": [[1.0, 1.2, 0.1]]},
        "backlog": None,
        "processor": {"looks": 400, "usual_s": 1e-6, "slow_s": 0.02,
                      "slow_in_stalls_s": 0.01, "slow_speed": 0.1},
        "gc": {"collections": 0, "pause_max_s": 0.0},
        "decoding": {"cpu_s": 0.01, "wall_s": 0.01, "helper_cpu_s": 0.02},
        "connections": {"opened": 3, "reused": 9, "known": ["127.0.0.1"], "not_opened_ahead": 0},
        "encoded_late": 0, "spilled_bytes": 0,
    }  # fmt: skip


def test_a_complete_report_is_accepted():
    report = read_self_report(self_report(), 0)
    assert report.to_json() == self_report()
    unknown = {"cores": None, "cpu_share": None, "processor": None}
    assert read_self_report(self_report() | unknown, 0).processor is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cpu_share": "none of it"}, 'cpu_share: expected float [|] null, found "none of it"'),
        ({"cpu_share": -0.5}, ">= 0"),
        ({"window_s": math.inf}, "expected a finite number"),
        ({"loop_lag_s": {}}, "loop_lag_s.n: this key is missing"),
        ({"cores": {"allowed": []}}, "cores.online: this key is missing"),
        (
            {"stalls": {"over_s": 0.05, "spans_s": [[math.nan, 1.0, 0.1]]}},
            "expected a finite number",
        ),
        ({"of another version": 1}, "unknown field"),
        ({"shard": 1}, "is of shard 1"),
        ({"broken": "x" * 3000}, "length <= 2000"),
    ],
)
def test_anything_else_is_not(changes, why):
    with pytest.raises(Bad, match=why):
        read_self_report(self_report() | changes, 0)
