"""What the preflights of several runs ask of one server that stays up."""

import io
from contextlib import nullcontext

import pytest
from rich.console import Console

from loadgen.records import Status
from loadgen.run.execute import execute
from loadgen.run.run_options import RunOptions
from loadgen.run.target import Choice, open_server, open_target
from loadgen.workload.prompts import Prompts
from loadgen.workload.scenario import Scenario, scenario_from_flags
from loadgen.workload.schedule import make_plan

pytestmark = pytest.mark.e2e
QUIET = Console(file=io.StringIO())


def scenario(seed=0, rate="5/s", input_len=40, output_len=4):
    return scenario_from_flags(
        rate=rate, input_len=input_len, output_len=output_len, duration="2s",
        overrides={"seed": seed},
    )  # fmt: skip


@pytest.fixture
def asked(tmp_path):
    """How often a mock is asked for tokens by the preflights of `scenarios`, one after another."""

    def count(*scenarios, engine="", as_url=False):
        logs = tmp_path / "logs"
        with open_server(Choice("mock", engine), logs, QUIET) as mock:
            choice = Choice(mock.endpoint.url if as_url else "mock")
            with open_server(choice, logs, QUIET) if as_url else nullcontext(mock) as server:
                for one in scenarios:
                    schedule = make_plan(one).schedule
                    with open_target(choice, one, schedule, logs, QUIET, server=server) as target:
                        own = Prompts(one.prompts, one.seed, b"preflight")
                        assert target.prompts is not None
                        sent = target.prompts.render(schedule[0], target.fit)
                        assert sent == own.render(schedule[0], target.fit)
                        assert {"reachable", "prompt_fit"} <= {c["check"] for c in target.checks}
        return len((logs / "truth.csv").read_text().splitlines()) - 1

    return count


def test_a_server_of_ours_is_asked_once_for_runs_that_differ_by_seed_and_rate(asked):
    once = asked(scenario())
    assert once > 5
    assert asked(scenario(), scenario(seed=1), scenario(rate="9/s")) == once


@pytest.mark.parametrize("other", [{"input_len": 50}, {"output_len": 9}])
def test_other_lengths_are_asked_about_again(asked, other):
    assert asked(scenario(), scenario(**other)) == asked(scenario()) + asked(scenario(**other))


def test_a_url_is_asked_before_every_run_for_nobody_knows_what_became_of_it(asked):
    assert asked(scenario(), scenario(seed=1), as_url=True) == 2 * asked(scenario())


def test_what_was_found_wrong_is_asked_about_again(asked):
    uncounted = {"engine": "usage=off"}
    assert asked(scenario(), scenario(seed=1), **uncounted) == 2 * asked(scenario(), **uncounted)


@pytest.mark.parametrize("cancels", [False, True])
def test_a_server_that_did_not_answer_everything_well_has_to_pass_again(tmp_path, cancels):
    values = scenario(output_len=200).resolved()
    if cancels:
        values["requests"]["cancel"] = {"share": "100%", "after": "1ms"}
    one = Scenario.model_validate(values)
    with open_server(Choice("mock"), tmp_path / "logs", QUIET) as mock:
        for number in range(2):
            options = RunOptions(out_dir=tmp_path / str(number))
            run = execute(one, "mock", options, QUIET, server=mock).run
            assert (run.request_rows["status"] == Status.ok).all() != cancels
        assert bool(mock.known) != cancels
