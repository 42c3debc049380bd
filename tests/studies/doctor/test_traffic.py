"""`slobench doctor` with the flags of a traffic: can this machine, or this server, carry it?"""

import io
import json
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from loadgen.cli.app import app
from loadgen.errors import UsageError
from loadgen.studies.doctor.run import check_traffic, longest_lengths
from loadgen.studies.doctor.view import tables
from loadgen.workload.scenario import scenario_from_flags

LENGTHS: dict[str, Any] = {"input_len": 32, "output_len": 8, "duration": "60s"}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("load", "least", "most"),
    [({"rate": "40/s"}, 20.0, 65.0), ({"concurrency": 4}, 15.0, 4 / 0.12)],
)
def test_a_traffic_is_sent_to_a_server_on_this_machine(load, least, most, page_cache):
    """4 in flight against answers of 50 ms + 7 × 10 ms: at most 33.3 requests per second."""
    scenario = scenario_from_flags(**load, **LENGTHS)
    facts = check_traffic(scenario, 4.5, page_cache, "").to_json()
    (trial,) = facts["trials"]
    assert (facts["kind"], facts["output_tokens"]) == ("traffic", 8)
    assert least <= trial["rate_per_s"] <= most
    assert trial["n_requests"] <= trial["rate_per_s"] * 1.5 + 0.7 * trial["rate_per_s"] + 4
    assert not [problem for problem in trial["problems"] if "requests ended as" in problem]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(tables(facts))
    assert "workers as for a run, at most 8 tokens each" in console.export_text()


def test_the_longest_lengths_are_those_of_the_schedule():
    lengths = {"kind": "uniform", "min": 5, "max": 5}
    scenario = scenario_from_flags(rate="50/s", input_len=lengths, output_len=9, duration="2s")
    assert longest_lengths(scenario) == (5, 9)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--rate", "8", "--target", "mock"], "--rate: with --target, doctor sends single"),
        (["--input-len", "8"], "the traffic has no load: add --rate N or --concurrency N"),
        (["--prove", "--rate", "8"], "--prove has rates and lengths of its own"),
    ],
)
def test_flags_without_a_meaning_here_are_refused(words, problem):
    result = CliRunner().invoke(app, ["doctor", *words])
    assert isinstance(result.exception, UsageError)
    assert problem in str(result.exception)


@pytest.mark.e2e
def test_the_lengths_of_the_flags_are_compared_with_the_servers_limit():
    words = ["doctor", "--target", "mock", "--engine", "max_model_len=300", "--json"]
    fits = CliRunner().invoke(app, [*words, "--input-len", "200", "--output-len", "50"])
    too_long = CliRunner().invoke(app, [*words, "--input-len", "400", "--output-len", "50"])
    assert (fits.exit_code, too_long.exit_code) == (0, 3)
    assert "400 + 50 tokens" in " ".join(json.loads(too_long.stdout)["reasons"])
