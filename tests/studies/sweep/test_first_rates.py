"""`slobench run --target URL` and nothing else: five rates, the sweep over them, its command."""

import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from loadgen.cli.app import app
from loadgen.studies.sweep.first_rates import five_rates


@pytest.mark.parametrize(
    ("highest_per_s", "rates"),
    [
        (10.0, [2.0, 4.0, 6.0, 8.0, 10.0]),
        (66.9, [13.0, 26.0, 39.0, 52.0, 65.0]),
        (0.125, [0.025, 0.05, 0.075, 0.1, 0.125]),
    ],
)
def test_five_rates_are_equal_steps_of_two_digits(highest_per_s, rates):
    assert five_rates(highest_per_s) == pytest.approx(rates)


@given(st.floats(1e-3, 1e5))
def test_five_rates_end_at_most_a_tenth_below_the_highest(highest_per_s):
    rates = five_rates(highest_per_s)
    assert len(set(rates)) == 5
    assert rates == sorted(rates)
    assert 0.9 * highest_per_s <= rates[-1] <= highest_per_s * (1 + 1e-6)


def test_a_target_alone_is_swept_to_its_throughput_and_the_command_is_printed(tmp_path):
    engine = "shape=8b,max_num_seqs=2"
    words = ["run", "--target", "sim", "--engine", engine, "--slo", "ttft<1s"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "s")])
    assert result.exit_code == 0, result.output
    assert re.match(
        r"no traffic given: .* SLO ttft <= 1s: about 2.18 min, at most 3.95 min", result.stderr
    )
    (line,) = re.findall(r"^running: (slobench sweep .*)$", result.stderr, re.MULTILINE)
    command = shlex.split(line)
    (over,) = [word for word in command if word.startswith("rate=")]
    rates = [float(text.removesuffix("/s")) for text in over.removeprefix("rate=").split(",")]
    assert len(rates) == 5
    for rate in rates:
        assert f"{rate:g}/s" in result.stdout
    assert "ttft <= 1s" in command
    assert result.stdout.count("met") >= 3
    assert "missed" in result.stdout  # the last rate is all that two slots can do
    dry = CliRunner().invoke(app, [*command[1:], "--dry-run"])
    assert dry.exit_code == 0, dry.output


@pytest.mark.parametrize("words", [["--rate", "3"], ["--seed", "3"], ["--set", "seed=3"]])
def test_a_traffic_that_is_half_given_is_asked_for_in_full(words):
    result = CliRunner().invoke(app, ["run", "--target", "sim", *words])
    assert ", --output-len" in str(result.exception)
