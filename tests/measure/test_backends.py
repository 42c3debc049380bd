"""Requests per address, and whether kept connections pinned them to some."""

from dataclasses import replace
from typing import Any

import pytest

from loadgen.measure.aggregate import summarize
from loadgen.records import Run, Status
from tests.runs import measured_run, with_manifest, with_shard

ADDRESSES = ("", "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")


def spread_run(*shares: int, known: tuple[str, ...] = (), **options: Any) -> Run:
    """220 requests, of which address k got `shares[k]` in turn; the rest went to the first."""
    run = measured_run(**options)
    run.request_rows["remote_id"] = 1
    start = 20  # the warm-up's
    for number, share in enumerate(shares, start=1):
        run.request_rows["remote_id"][start : start + share] = number
        start += share
    connections = {"opened": 4, "reused": 216, "known": list(known)}
    named = replace(run, names=replace(run.names, remotes=ADDRESSES))
    return with_shard(named, connections=connections)


def test_requests_are_counted_by_address_busiest_first() -> None:
    run = spread_run(50, 150)
    run.request_rows["status"][25] = Status.http_error
    one, other = summarize(run).to_json()["backends"]
    assert (one["address"], one["requests"], one["ok"]) == ("10.0.0.2:8000", 150, 150)
    assert (other["address"], other["requests"], other["ok"]) == ("10.0.0.1:8000", 50, 49)
    assert one["output_tokens"] == 150 * 20
    assert 0.05 < one["ttft_from_send_s"] < 0.2


def told(run: Run) -> list[str]:
    return [
        finding
        for finding in summarize(run).findings
        if "because connections are reused" in finding
    ]


def test_kept_connections_that_use_one_address_more_are_told() -> None:
    (said,) = told(spread_run(160, 40))
    assert said.startswith(
        "80 % of the requests went to 10.0.0.1:8000, one of 2 addresses of the target, "
    )


def test_an_address_that_got_nothing_is_told() -> None:
    (said,) = told(spread_run(100, 100, known=ADDRESSES[1:]))
    assert said.startswith("50 % of the requests went to ")
    assert "one of 3 addresses" in said
    assert ", 1 received none, because" in said


@pytest.mark.parametrize("shares", [(100, 100), (140, 60), (200,)])
def test_an_even_load_and_a_single_address_are_not(shares: tuple[int, ...]) -> None:
    assert told(spread_run(*shares)) == []


def test_connections_that_are_not_kept_pin_nothing() -> None:
    run = spread_run(160, 40)
    target = {"connections": "never"}
    assert told(with_manifest(run, target=target)) == []
