"""The requests that the preflights of several runs send to one server that stays up."""

import io
import json
import time
from contextlib import nullcontext

import pytest
from rich.console import Console

from loadgen.records import Status
from loadgen.run.execute import execute
from loadgen.run.run_options import RunOptions, RunSetup
from loadgen.run.target import open_server, open_target
from loadgen.workload.prompts import Prompts
from loadgen.workload.scenario import Scenario, scenario_from_flags, varied
from loadgen.workload.schedule import make_plan
from targets.base import Request

pytestmark = pytest.mark.e2e
QUIET = Console(file=io.StringIO())


def scenario(seed=0, rate="5/s", input_len=40, output_len=4):
    return scenario_from_flags(
        rate=rate, input_len=input_len, output_len=output_len, duration="2s",
        overrides={"seed": seed},
    )  # fmt: skip


@pytest.fixture
def n_requests(tmp_path):
    """`n_requests(*scenarios)`: the completions that a mock serves to the preflights of these
    scenarios, which follow each other."""

    def count(*scenarios, engine="", as_url=False):
        logs = tmp_path / "logs"
        options = RunOptions()
        with open_server("mock", RunOptions(engine=engine), logs, QUIET) as mock:
            url = mock.endpoint.url if as_url else "mock"
            with open_server(url, options, logs, QUIET) if as_url else nullcontext(mock) as server:
                for each in scenarios:
                    plan = make_plan(each)
                    first = plan.schedule[0]
                    setup = RunSetup(each, plan, url, options, tmp_path, QUIET)
                    with open_target(setup, server=server) as target:
                        own = Prompts(each.prompts, each.seed, b"preflight")
                        assert target.prompts is not None
                        sent = target.prompts.render(first, target.fit)
                        assert sent == own.render(first, target.fit)
                        assert {"reachable", "prompt_fit"} <= {c["check"] for c in target.checks}
        return len((logs / "truth.csv").read_text().splitlines()) - 1

    return count


def test_a_second_preflight_sends_requests_only_where_the_first_does_not_apply(n_requests):
    n_first = n_requests(scenario())
    assert n_first > 5
    assert n_requests(scenario(), scenario(seed=1), scenario(rate="9/s")) == n_first
    longer_input, longer_output = scenario(input_len=50), scenario(output_len=9)
    n_others = n_requests(longer_input) + n_requests(longer_output)
    assert n_requests(scenario(), longer_input, longer_output) == n_first + n_others
    # The server behind a URL may have been replaced between two runs.
    assert n_requests(scenario(), scenario(seed=1), as_url=True) == 2 * n_first


def test_every_request_has_the_sampling_parameters_of_its_scenario(tmp_path):
    """Also where a preflight of other parameters is known; a target file's extra_body replaces."""

    def sent(server, target, settings=(), **sampling):
        each = varied(scenario(), {"sampling": sampling})
        options = RunOptions(target_settings=settings)
        setup = RunSetup(each, make_plan(each), target, options, tmp_path, QUIET)
        with open_target(setup, server=server) as target:
            assert target.to_manifest().extra_body == target.adapter.extra_body
            body = json.loads(target.adapter.encode(Request("a", 1)).body)
            return {name: body[name] for name in ("top_p", "top_k") if name in body}

    with open_server("mock", RunOptions(), tmp_path / "logs", QUIET) as mock:
        assert sent(mock, "mock", top_p=0.9) == {"top_p": 0.9}
        assert sent(mock, "mock", top_p=0.5, top_k=20) == {"top_p": 0.5, "top_k": 20}
        assert sent(mock, "mock") == {}
        of_file = ["extra_body.top_p=0.1"]
        own = sent(None, mock.endpoint.url, of_file, top_p=0.5, top_k=20)
        assert own == {"top_p": 0.1, "top_k": 20}


def test_a_failed_check_is_repeated_by_every_preflight(n_requests):
    uncounted = {"engine": "usage=off"}
    n_first = n_requests(scenario(), **uncounted)
    assert n_requests(scenario(), scenario(seed=1), **uncounted) == 2 * n_first


def test_a_server_whose_requests_did_not_all_succeed_needs_a_preflight_again(tmp_path, page_cache):
    values = scenario(output_len=200).resolved()
    with open_server("mock", RunOptions(), tmp_path / "logs", QUIET) as mock:
        for number, cancels in enumerate((False, False, True)):
            if cancels:
                values["requests"]["cancel"] = {"share": "100%", "after": "1ms"}
            options = RunOptions(out_dir=tmp_path / str(number), cache_dir=page_cache)
            run = execute(Scenario.model_validate(values), "mock", options, QUIET, server=mock).run
            assert (run.request_rows["status"] == Status.ok).all() != cancels
            assert bool(mock.known) != cancels


def test_a_preflight_is_reused_while_it_is_recent_and_the_models_are_the_same(tmp_path):
    said = io.StringIO()
    console = Console(file=said, width=200)

    def opened(url, seed=0, reuse_s=600.0, **changes):
        """The adapter and the lines of a run's preflight."""
        options = RunOptions(reuse_preflight_s=reuse_s, cache_dir=tmp_path / "cache", **changes)
        each = scenario(seed=seed)
        setup = RunSetup(each, make_plan(each), url, options, tmp_path, console)
        with open_target(setup) as target:
            return target.adapter, target.fit, [line.check for line in target.checks]

    def n_served(log_dir):
        return len((log_dir / "truth.csv").read_text().splitlines()) - 1

    with open_server("mock", RunOptions(engine="model=a"), tmp_path / "first", QUIET) as mock:
        url = mock.endpoint.url
        adapter, fit, _ = opened(url)
        again = opened(url, seed=1)
        assert again[:2] == (adapter, fit)
        assert again[2][:2] == ["preflight", "reachable"]
        assert "ago counts: GET /v1/models lists the same models" in said.getvalue()
        assert "preflight" not in opened(url, reuse_s=0.0)[2]
        time_s = time.time()
        for path in (tmp_path / "cache" / "preflights").iterdir():
            known = json.loads(path.read_text())
            path.write_text(json.dumps({**known, "at_utc_s": time_s - 601}))
        assert "preflight" not in opened(url)[2]
        assert "not reused: no successful one with such requests" in said.getvalue()
        for path in (tmp_path / "cache" / "preflights").iterdir():
            known = json.loads(path.read_text())
            path.write_text(json.dumps({**known, "models": {"b": None}}))
        assert "preflight" not in opened(url)[2]
        assert "not reused: GET /v1/models does not list the same models" in said.getvalue()
    n_of_each = n_served(tmp_path / "first") / 4  # without the reused preflight
    assert n_of_each == int(n_of_each)
