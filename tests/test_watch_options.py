"""Who may watch a run, as flags and the environment say."""

from importlib.util import find_spec

import pytest

from loadgen.cli.parse import read_watch, watched_together
from loadgen.errors import UsageError
from loadgen.run.run_options import NOBODY, Watch

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
    asked = read_watch(None, "127.0.0.1", None, environ)
    assert asked.otlp == ("" if is_followed and INSTALLED else None)
    assert asked.is_on is (is_followed and INSTALLED)


def test_the_flag_wins_and_says_what_is_missing():
    if not INSTALLED:
        with pytest.raises(UsageError, match=r"slobench\[otel\]"):
            read_watch(None, "127.0.0.1", "http://a:4318", URL)
        return
    assert read_watch(None, "127.0.0.1", "http://a:4318", URL).otlp == "http://a:4318"


def test_runs_that_are_all_simulated_cannot_be_watched():
    with pytest.raises(UsageError, match="virtual time"), watched_together(Watch(port=0), ["sim"]):
        raise AssertionError("was begun")
    with watched_together(Watch(), ["sim"]) as each:
        assert each == NOBODY
