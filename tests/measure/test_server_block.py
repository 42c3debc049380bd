"""The server's own account beside the client's, in numbers known beforehand."""

from dataclasses import replace

import numpy as np
import pytest

from loadgen.measure.aggregate import summarize
from loadgen.measure.server_load import describe_server
from loadgen.records import SERVER, Run
from tests.runs import measured_run, with_manifest


def told(run: Run, **series: list[tuple[float, float]]) -> Run:
    """The run with readings of some series."""
    names = tuple(series)
    rows = [(t_s, names.index(name), v) for name, found in series.items() for t_s, v in found]
    return replace(
        run,
        server_rows=np.array(sorted(rows), SERVER),
        names=replace(run.names, series=names),
    )


def test_the_block_counts_between_the_first_and_last_reading_of_the_window() -> None:
    """The window is from 2 s to 22 s; readings before and after it are not in it."""
    run = told(
        measured_run(),
        waiting=[(1.0, 99.0), (2.5, 3.0), (12.0, 7.0), (21.5, 1.0), (23.0, 99.0)],
        running=[(2.5, 10.0), (21.5, 12.0)],
        kv_usage=[(2.5, 0.25), (12.0, 0.75), (21.5, 0.5)],
        preemptions=[(1.0, 1.0), (2.5, 4.0), (21.5, 6.0), (23.0, 50.0)],
        generation_tokens=[(1.0, 0.0), (2.5, 500.0), (21.5, 4300.0), (23.0, 4400.0)],
        cache_queries=[(2.5, 1000.0), (21.5, 3000.0)],
        cache_hits=[(2.5, 100.0), (21.5, 600.0)],
    )
    server = summarize(run).server
    assert server is not None
    assert (server.n_scrapes, server.from_s, server.to_s) == (3, 2.5, 21.5)
    assert (server.waiting_max, server.running_max, server.kv_usage_max) == (7.0, 12.0, 0.75)
    assert server.preemptions == 2.0
    assert server.generation_tokens == 3800.0
    assert server.cache_hit_rate == 0.25
    assert server.prompt_tokens is None
    # 10 requests/s of 20 tokens each, received over 19 s
    assert server.received_tokens == pytest.approx(3800, rel=0.01)
    assert describe_server(server).startswith(
        "up to 7 waiting, up to 12 running, KV up to 75 %, 2 preem"
    )
    assert summarize(run).to_json()["server"]["kv_usage_max"] == 0.75


def test_without_readings_in_the_window_there_is_no_block() -> None:
    assert summarize(measured_run()).server is None
    assert summarize(told(measured_run(), running=[(1.0, 2.0)])).server is None
    assert summarize(measured_run()).to_json()["server"] is None


def test_a_counter_that_stands_still_grew_by_zero() -> None:
    summary = summarize(told(measured_run(), preemptions=[(2.5, 4.0), (12.0, 4.0), (21.5, 4.0)]))
    assert summary.server is not None
    assert summary.server.preemptions == 0.0


def test_a_counter_that_was_set_back_says_nothing() -> None:
    """As after a restart of the server."""
    server = summarize(
        told(measured_run(), preemptions=[(3.0, 9.0), (9.0, 0.0), (12.0, 20.0)])
    ).server
    assert server is not None
    assert server.preemptions is None


def test_a_server_that_states_its_hit_rate_itself_is_taken_at_its_word() -> None:
    server = summarize(told(measured_run(), cache_hit_rate=[(3.0, 0.2), (9.0, 0.4)])).server
    assert server is not None
    assert server.cache_hit_rate == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("made", "n_failed", "says"),
    [
        (4400.0, 0, ""),
        (4450.0, 0, ""),  # 220 requests × 20 tokens; 2 % or 100 tokens are none to speak of
        (6000.0, 0, "6 000 output tokens during the run, but 4 400 were received: other clients"),
        (6000.0, 5, "5 requests failed, or other clients used it"),
        (2200.0, 0, "its metrics do not cover every process that answered"),
    ],
)
def test_tokens_that_somebody_else_got_are_told(made: float, n_failed: int, says: str) -> None:
    run = told(
        measured_run(n_failed=n_failed), generation_tokens=[(-0.04, 7.0), (40.0, 7.0 + made)]
    )
    found = [f for f in summarize(run).findings if f.startswith("The server counted")]
    assert len(found) == bool(says)
    assert says in "".join(found).replace("\u202f", " ")


def test_readings_that_failed_are_one_finding() -> None:
    scrapes = {"n": 40, "n_failed": 3, "reason": "no answer within 3 s"}
    findings = summarize(with_manifest(measured_run(), scrapes=scrapes)).findings
    found = [f for f in findings if "readings" in f]
    assert found == [
        "3 of 40 readings of the server's metrics failed, the first because: no answer within 3 s."
    ]
