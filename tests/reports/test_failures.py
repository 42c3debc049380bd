"""Kinds of failure, as the page tells them."""

import pytest

from reports.run.failures import failures
from tests.runs import measured_run


def test_failures_are_grouped_by_how_they_ended() -> None:
    run = measured_run(n_failed=5)
    (kind,) = failures(run)
    assert (kind.status, kind.http_status, kind.n) == ("http_error", 503, 5)
    assert kind.first_s == pytest.approx(21.5)
    assert kind.by_class == {"default": 5}
    assert [sample.request_id for sample in kind.samples] == [215, 216, 217]
    assert kind.samples[0].lasted_s == pytest.approx(0.01)
    assert "| curl -sSN http://127.0.0.1:8000/v1/chat/completions" in kind.samples[0].curl
