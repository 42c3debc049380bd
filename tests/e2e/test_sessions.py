"""Sessions, chains and users against the scripted mock server: real processes and sockets."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from loadgen.archive.store import read_run
from loadgen.measure.aggregate import summarize
from loadgen.records import Status
from loadgen.run.execute import record
from loadgen.run.run_options import RunOptions, RunSetup
from loadgen.run.target import open_target
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan

pytestmark = pytest.mark.e2e
LENIENT = {
    **dict.fromkeys(("lateness", "loop_lag", "read_backlog"), "60s"),
    **dict.fromkeys(("cpu", "run_delay"), "100%"),
}
MOCK_ANSWER = " the model of latency token and server time"  # its first eight words, one a token
REQUESTS = {"input_tokens": 40, "output_tokens": 8}
TURNS = {"turns": 2, "think": "100ms"}


def recorded(directory: Path, engine: str, n_workers: int = 2, **keys):
    scenario = Scenario.model_validate(
        {
            "name": "recorded",
            "phases": {"measure": "1500ms", "drain": "5s"},
            "instrument": LENIENT,
            "stop_when": "never",
            **keys,
        }
    )
    plan, quiet = make_plan(scenario), Console(quiet=True)
    options = RunOptions(
        n_workers=n_workers, engine=f"chars_per_token=1,overhead_tokens=8,{engine}"
    )
    setup = RunSetup(scenario, plan, "mock", options, directory, quiet)
    with open_target(setup) as target:
        return record(setup, target)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Sessions with real and with scripted answers, and chains, side by side in two processes."""
    step = {"input_tokens": 40, "output_tokens": 4}
    arrivals = {"kind": "constant", "rate": "8/s"}
    return recorded(
        tmp_path_factory.mktemp("sessions"),
        "ttft=40ms,itl=3ms",
        classes={
            "real": {
                "arrivals": arrivals,
                "requests": REQUESTS,
                "session": {**TURNS, "context": "real"},
                "slo": ["ttft <= 30s"],
                "priority": 3,
                "tenant": "a",
            },
            "scripted": {"arrivals": arrivals, "requests": REQUESTS, "session": TURNS},
            "chain": {
                "arrivals": arrivals,
                "chain": [
                    {"name": "plan", "requests": step},
                    {
                        "name": "slow",
                        "after": ["plan"],
                        "requests": {"input_tokens": 40, "output_tokens": 40},
                    },
                    {"name": "quick", "after": ["plan"], "requests": step},
                    {"name": "join", "after": ["slow", "quick"], "think": "50ms", "requests": step},
                ],
                "slo": ["ttft <= 15ms", "attainment >= 50%"],
            },
        },
    )


def of_class(run, name):
    return np.flatnonzero(run.schedule_rows["class_id"] == run.names.classes.index(name))


def was_sent(run, rows):
    """The rows among `rows` that were released."""
    return rows[np.isfinite(run.request_rows["released_s"][rows])]


def test_everything_released_ended_well_and_the_rest_says_why(run):
    status = run.request_rows["status"]
    assert set(status.tolist()) <= {Status.ok, Status.not_released}
    unreleased = np.flatnonzero(status == Status.not_released)
    assert (run.schedule_rows["n_parents"][unreleased] > 0).all()
    causes = {run.names.errors[k] for k in run.request_rows["error_id"][unreleased]}
    assert all("parent" in cause for cause in causes)


def test_a_row_leaves_when_its_last_parent_has_ended_and_it_has_thought(run):
    rows, plan, edges = run.request_rows, run.schedule_rows, run.edge_rows
    assert len(edges) > 60
    n_checked = 0
    for child in was_sent(run, np.flatnonzero(plan["n_parents"] > 0)):
        parents = edges["after"][edges["request_id"] == child]
        assert len(parents) == plan["n_parents"][child]
        planned_s = rows["done_s"][parents].max() + plan["think_s"][child]
        assert rows["released_s"][child] == pytest.approx(planned_s, abs=1e-6)
        assert rows["sent_s"][child] >= rows["released_s"][child]
        n_checked += 1
    assert n_checked > 40


def test_a_join_waits_for_the_slower_branch(run):
    rows = of_class(run, "chain").reshape(-1, 4)
    done_s, released_s = run.request_rows["done_s"], run.request_rows["released_s"]
    joined = [chain for chain in rows if np.isfinite(released_s[chain[3]])]
    assert len(joined) >= 8
    for _, slow, quick, join in joined:
        assert done_s[slow] > done_s[quick]
        assert released_s[join] == pytest.approx(done_s[slow] + 0.05, abs=1e-6)


def test_a_second_turn_holds_the_answer_that_the_server_gave(run):
    """Prompt tokens by the server's own count, a character each: its template, the first question,
    its answer, the second question."""
    second = was_sent(run, of_class(run, "real")[1::2])
    assert len(second) >= 8
    assert set(run.schedule_rows["input_tokens"][second].tolist()) == {40 + 8 + 40}  # the estimate
    counted = 8 + 32 + len(MOCK_ANSWER) + 40
    assert set(run.request_rows["input_tokens"][second].tolist()) == {counted}


def test_a_second_turn_holds_the_reasoning_too_where_it_is_kept(tmp_path):
    """Three of the eight tokens are reasoning; a space between two tokens belongs to the later."""
    session = {**TURNS, "context": "real"}
    kept = recorded(
        tmp_path,
        "ttft=5ms,itl=1ms,reasoning=3",
        n_workers=1,
        arrivals={"kind": "constant", "rate": "8/s"},
        classes={
            word: {"requests": REQUESTS, "session": {**session, "reasoning": word}}
            for word in ("drop", "keep")
        },
    )
    lengths = {}
    for word in ("drop", "keep"):
        second = was_sent(kept, of_class(kept, word)[1::2])
        assert len(second)
        (lengths[word],) = set(kept.request_rows["input_tokens"][second].tolist())
    assert lengths["keep"] == 8 + 32 + len(MOCK_ANSWER) + 40
    assert lengths["drop"] == lengths["keep"] - len(" the model of")
    assert set(kept.schedule_rows["context"].tolist()) == {0, 2, 3}


def test_a_scripted_second_turn_has_exactly_the_planned_tokens(run):
    rows = was_sent(run, of_class(run, "scripted"))
    assert set(run.schedule_rows["input_tokens"][rows].tolist()) == {40, 88}
    assert np.array_equal(
        run.request_rows["input_tokens"][rows], run.schedule_rows["input_tokens"][rows]
    )


def test_sessions_stay_with_one_load_generator(run):
    shards = run.request_rows["shard"]
    assert set(shards.tolist()) == {0, 1}
    for session in np.unique(run.schedule_rows["session_id"]):
        assert len(set(shards[run.schedule_rows["session_id"] == session].tolist())) == 1


def test_each_class_is_judged_by_its_own_promises(run):
    summary = summarize(run)
    assert summary.classes["real"].verdict == "met"
    assert summary.classes["scripted"].slo == ()
    assert summary.classes["chain"].verdict == "missed"
    assert summary.classes["chain"].attainment.value == 0.0
    assert summary.verdict == "missed"
    assert summary.reasons[0].startswith("chain: attainment >= 50%: missed")
    due = [part.counts["due"] for part in summary.classes.values()]
    assert sum(due) == summary.counts["due"]
    assert (summary.classes["real"].tenant, summary.classes["real"].priority) == ("a", 3)


def test_what_follows_a_failure_is_accounted_for(tmp_path):
    """Errors inside a 200 for three tenths of all: their sessions end, and the users go on."""
    run = recorded(
        tmp_path,
        "ttft=45ms,itl=1ms,fail=inband:30%",
        n_workers=1,
        classes={
            "talk": {
                "arrivals": {"kind": "constant", "rate": "40/s"},
                "requests": REQUESTS,
                "session": {"turns": 2},
            },
            "user": {
                "arrivals": {"kind": "users", "users": 4, "think": "20ms"},
                "requests": {"input_tokens": 40, "output_tokens": 30},
            },
        },
    )
    rows, plan = run.request_rows, run.schedule_rows
    first, second = of_class(run, "talk")[::2], of_class(run, "talk")[1::2]
    failed = rows["status"][first] == Status.stream_error
    assert 5 <= failed.sum() <= 40
    assert (rows["status"][second][failed] == Status.not_released).all()
    causes = {run.names.errors[k] for k in rows["error_id"][second][failed]}
    assert all(cause.endswith("ended with stream_error") for cause in causes)
    assert len(causes) == failed.sum()
    users = of_class(run, "user")
    for user in np.unique(plan["session_id"][users]):
        own = users[plan["session_id"][users] == user]
        sent = was_sent(run, own)
        assert np.array_equal(sent, own[: len(sent)])
        assert len(sent) > 8
        broken = np.flatnonzero(rows["status"][sent[:-1]] != Status.ok)
        assert len(broken) > 0
        assert (rows["sent_s"][sent[broken + 1]] > rows["done_s"][sent[broken]]).all()
        in_flight = rows["done_s"][sent[:-1]] < rows["sent_s"][sent[1:]]
        assert in_flight.all(), "a user has one request at a time"
    summary = summarize(run)
    assert not any("never came due" in s and "user" in s for s in summary.findings)
    assert next(c for c in summary.validity.checks if c.name == "stimulus").ok is True


def test_users_of_a_fast_server_go_on_beyond_their_plan(tmp_path):
    """Planned for answers of 42 ms; the mock takes a few. Turns quote real answers of the added
    rows, too."""
    run = recorded(
        tmp_path,
        "ttft=0ms,itl=0ms,coalesce=400",
        classes={
            "user": {
                "arrivals": {"kind": "users", "users": 6, "think": "0s"},
                "requests": {"input_tokens": 40, "output_tokens": 400},
                "session": {"turns": 2, "think": "0s", "context": "real"},
            },
            "single": {
                "arrivals": {"kind": "constant", "rate": "8/s"},
                "requests": REQUESTS,
            },
        },
    )
    rows, plan, n_planned = run.request_rows, run.schedule_rows, run.manifest.n_requests
    n_added = run.manifest.extended_rows
    assert n_added > 0
    assert len(plan) == n_planned + n_added
    assert np.array_equal(plan["request_id"], rows["request_id"])
    users = of_class(run, "user")
    assert set(np.unique(plan["session_id"][users[users >= n_planned]])) == set(
        np.unique(plan["session_id"][users])
    )
    for user in np.unique(plan["session_id"][users]):
        own = users[plan["session_id"][users] == user]
        sent = was_sent(run, own)
        assert np.array_equal(sent, own[: len(sent)])
        assert (rows["status"][sent] == Status.ok).all()
        assert (rows["done_s"][sent[:-1]] <= rows["released_s"][sent[1:]] + 1e-9).all()
    is_turn = (rows["status"] == Status.ok) & (plan["context"] > 0)
    longer = rows["input_tokens"].astype(int) - plan["input_tokens"]  # by the real answers
    assert len(longer[n_planned:][is_turn[n_planned:]]) > 0
    assert set(longer[n_planned:][is_turn[n_planned:]]) == set(
        longer[:n_planned][is_turn[:n_planned]]
    )
    checks = {check.name: check.ok for check in summarize(run).validity.checks}
    assert checks["stimulus"] is True
    assert checks["record"] is True
    assert read_run(tmp_path).schedule_rows.tobytes() == plan.tobytes()
