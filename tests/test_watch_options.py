"""The exports of live metrics that flags and the environment ask for."""

from importlib.util import find_spec

import pytest

from loadgen.cli.flags import WatchFlags
from loadgen.cli.parse import read_watch, shared_watch
from loadgen.errors import UsageError
from loadgen.live.watching import Watch

INSTALLED = find_spec("opentelemetry") is not None
URL = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.mark.parametrize(
    ("environ", "is_followed"),
    [
        ({}, False),
        (URL, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://collector:4318/v1/metrics"}, True),
        ({**URL, "OTEL_METRICS_EXPORTER": "none"}, False),
        ({**URL, "OTEL_SDK_DISABLED": "TRUE"}, False),
    ],
)
def test_the_standard_variables_are_followed_where_the_packages_are(environ, is_followed):
    watch = read_watch(WatchFlags(), environ)
    assert watch == (Watch(otlp="") if is_followed and INSTALLED else None)


def test_the_flag_wins_and_says_what_is_missing():
    if not INSTALLED:
        with pytest.raises(UsageError, match=r"slobench\[otel\]"):
            read_watch(WatchFlags(otlp="http://a:4318"), URL)
        return
    assert read_watch(WatchFlags(otlp="http://a:4318"), URL) == Watch(otlp="http://a:4318")


def test_runs_that_are_all_simulated_cannot_be_watched():
    flags = WatchFlags(metrics_port=0)
    with pytest.raises(UsageError, match="virtual time"), shared_watch(flags, ["sim"]):
        raise AssertionError("the block was entered")
    with shared_watch(WatchFlags(), ["sim"]) as each:
        assert each is None
