"""A run whose requests are all refused is recognised from its first requests."""

from __future__ import annotations

import pytest

from loadgen.drive.first_failures import ALL_REFUSED, FirstFailures, refused
from loadgen.records import Status

BAD = (Status.http_error, 400)


def shard(*ends):
    failures = FirstFailures()
    for number, (status, http_status) in enumerate(ends):
        failures.ended(status, http_status, f"reason {number}".__str__)
    return failures.message()


def test_three_refusals_end_a_run_and_two_do_not():
    assert refused([shard(BAD, BAD)], 2) is None
    assert refused([shard(BAD, BAD, BAD)], 3) == f"{ALL_REFUSED}: reason 0 (all of the first 3)"


def test_the_shards_count_together_and_each_must_agree():
    assert refused([shard(BAD, BAD), shard(BAD), shard()], 3)
    assert refused([shard(BAD, BAD), shard((Status.http_error, 422))], 3) is None
    assert refused([shard(BAD, BAD, BAD), shard((Status.ok, 200))], 4) is None


@pytest.mark.parametrize("other", [(Status.ok, 200), (Status.http_error, 401), (Status.timeout, 0)])
def test_an_answer_of_another_kind_ends_the_matter(other):
    assert shard(BAD, other, BAD, BAD, BAD)[0] == 0
    assert shard(other, *[BAD] * 5)[0] == 0


@pytest.mark.parametrize("status", [408, 425, 429, 503, 529])
def test_a_full_server_refuses_nothing(status):
    assert shard(*[(Status.http_error, status)] * 20)[0] == 0


def test_a_rate_limit_inside_an_answer_refuses_nothing():
    failures = FirstFailures()
    for _ in range(20):
        reason = "error in the stream: Rate limit exceeded: free-models-per-min"
        failures.ended(Status.stream_error, 200, reason.__str__)
    assert failures.message()[0] == 0


def test_failures_that_may_be_chance_need_ten():
    broken = (Status.http_error, 500)
    page = (Status.stream_error, 200)
    for kind in (broken, page):
        assert refused([shard(*[kind] * 9)], 9) is None
        assert refused([shard(*[kind] * 10)], 10)


def test_at_the_end_of_a_run_one_refusal_is_enough():
    assert refused([shard(BAD)], 1, is_final=True)
    assert refused([shard((Status.http_error, 500))], 1, is_final=True) is None
    assert refused([shard()], 0, is_final=True) is None
