"""Assignments: data without secrets, from which a worker builds the same task."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadgen.errors import RunInvalid, UsageError
from loadgen.run.shard_tasks import Job
from loadgen.run.target import Target
from loadgen.web.assignment import assignments, environ_for, fingerprint, target_text, task_of
from loadgen.web.control_messages import LoadPiece, PieceAssembler, encode, read_down
from loadgen.workload.prompts import PromptFit
from loadgen.workload.scenario import load_scenario
from loadgen.workload.schedule import make_plan, merge, split_plan
from targets.endpoint import read_target
from tests.workload.hashed_trace import hashed_trace

KEY = "sk-a-secret-of-ours"
TARGET = "url: http://localhost:8000\nmodel: m\napi_key_env: OPENAI_API_KEY\n"
OTHER_KEY = "url: http://localhost:8000\nmodel: m\napi_key_env: SOME_KEY\n"
FLAGS = ["phases.measure=5s", "phases.warmup=0s"]


def job(text=TARGET, scenario="quickstart", flags=FLAGS, environ=None):
    chosen = load_scenario(scenario, flags)
    endpoint = read_target(
        text, "target.yaml", {"OPENAI_API_KEY": KEY, "SOME_KEY": KEY, **(environ or {})}
    )
    target = Target("url", endpoint, endpoint.adapter(), PromptFit(3.0, 0.25), [])
    plan = make_plan(chosen)
    return Job(chosen, plan, target, "fast", b"saltsalt", "a-run", Path("parts"), True)


def travelled(assignment):
    """The assignment and its rows as they arrive."""
    load = PieceAssembler(assignment.assign.n_pieces)
    for piece in assignment.rows:
        arrived = read_down(encode(piece))
        assert isinstance(arrived, LoadPiece)
        load.add(arrived)
    return read_down(encode(assignment.assign)), load.data()


def built(assignment, environ=None, own=None):
    assign, data = travelled(assignment)
    return task_of(
        assign, data, environ or {"OPENAI_API_KEY": KEY, "SOME_KEY": KEY}, own, Path("elsewhere")
    )


def test_the_worker_builds_the_same_task():
    asked = job()
    parts = split_plan(asked.plan, 3)
    tasks = [built(one) for one in assignments(asked, 3)]
    for part, task, given in zip(parts, tasks, assignments(asked, 3), strict=True):
        assert task.schedule.tobytes() == part.schedule.tobytes()
        assert fingerprint(task) == given.sha256
        assert ("authorization", f"Bearer {KEY}") in task.head.headers
    assert merge([task.schedule for task in tasks]).tobytes() == asked.plan.schedule.tobytes()
    assert sum(task.bounds.max_concurrency for task in tasks) == (
        asked.scenario.limits.max_concurrency
    )


def test_a_chain_stays_on_one_worker():
    asked = job(scenario="agent_multi_turn", flags=["phases.measure=20s"])
    for one in assignments(asked, 2):
        task = built(one)
        assert len(task.edges)
        assert np.isin(task.edges["after"], task.schedule["request_id"]).all()


def test_a_worker_writes_the_pieces_of_a_trace(tmp_path):
    whole = job()
    replayed = hashed_trace(tmp_path)
    whole = replace(whole, scenario=replayed, plan=make_plan(replayed))
    for one in assignments(whole, 2):
        task = built(one)
        rows = task.schedule[task.schedule["prefix_tokens"] > 40]
        written = [task.prompts.render(row, task.fit) for row in rows]
        assert written == [whole.prompts().render(row, task.fit) for row in rows]
        assert fingerprint(task) == one.sha256


def test_a_worker_sends_the_same_session_headers():
    text = f"{TARGET}session_header: [x-session-id, x-router]\n"
    for one in assignments(job(text), 2):
        assert built(one).head.session_headers == ("x-session-id", "x-router")


def test_a_worker_sends_the_same_trace_context():
    assert [built(one).head.has_trace_context for one in assignments(job(TARGET), 2)] == [False] * 2
    text = f"{TARGET}trace_context: true\n"
    assert [built(one).head.has_trace_context for one in assignments(job(text), 2)] == [True] * 2


def test_the_key_stays_where_it_is():
    for one in assignments(job(), 2):
        sent = encode(one.assign) + b"".join(map(encode, one.rows))
        assert KEY.encode() not in sent


def test_a_worker_without_the_key_reports_it():
    (one,) = assignments(job(), 1)
    with pytest.raises(UsageError, match="environment variable OPENAI_API_KEY is not set"):
        assert built(one, {"OTHER": "x"})


def test_header_values_come_from_the_worker_s_own_file(tmp_path):
    text = TARGET + "headers: {x-team: secret-team}\n"
    asked = job(text)
    (one,) = assignments(asked, 1)
    assert "secret-team" not in target_text(asked.target.endpoint) + str(one.assign)
    with pytest.raises(UsageError, match=r"header x-team.*--target FILE"):
        built(one)
    own = tmp_path / "own.yaml"
    own.write_text("url: http://elsewhere:1\nheaders: {x-team: secret-team}\n")
    with pytest.raises(UsageError, match=r"another server.*not sent to http://localhost:8000"):
        built(one, own=own)
    own.write_text("url: http://localhost:8000/v1\nheaders: {x-team: secret-team}\n")
    task = built(one, own=own)
    assert ("x-team", "secret-team") in task.head.headers
    assert task.head.host == "localhost:8000"


def test_a_certificate_comes_from_the_worker_s_own_file(tmp_path):
    (tmp_path / "ca.pem").write_text("a certificate\n")
    (one,) = assignments(job(TARGET + f"ca_cert: {tmp_path / 'ca.pem'}\n"), 1)
    with pytest.raises(UsageError, match=r"names a ca_cert.*--target FILE"):
        built(one)
    own = tmp_path / "own.yaml"
    own.write_text("url: http://localhost:8000\nca_cert: ca.pem\n")
    assert built(one, own=own).route.ca_cert == tmp_path / "ca.pem"


@pytest.mark.parametrize("text", [None, TARGET, OTHER_KEY.replace("localhost", "elsewhere")])
def test_another_variable_is_not_read_for_any_master(tmp_path, text):
    (one,) = assignments(job(OTHER_KEY), 1)
    own = tmp_path / "own.yaml"
    own.write_text(text or "")
    with pytest.raises(UsageError, match="the run needs the key in SOME_KEY"):
        built(one, own=own if text else None)


@pytest.mark.parametrize(
    "text", [OTHER_KEY, "launch: {command: [serve, '{port}']}\napi_key_env: SOME_KEY\n"]
)
def test_a_key_of_the_worker_s_own_file_goes_to_the_server_of_that_file(tmp_path, text):
    (one,) = assignments(job(OTHER_KEY), 1)
    own = tmp_path / "own.yaml"
    own.write_text(text)
    assert ("authorization", f"Bearer {KEY}") in built(one, own=own).head.headers


def test_a_key_that_the_target_does_not_name_is_not_sent(tmp_path):
    bare = "url: http://localhost:8000\nmodel: m\n"
    (one,) = assignments(job(bare, environ={"OPENAI_API_KEY": ""}), 1)
    own = tmp_path / "own.yaml"
    own.write_text(OTHER_KEY.replace("localhost", "elsewhere"))
    for file in (None, own):
        assert KEY not in str(built(one, own=file).head.headers)


@pytest.mark.parametrize(
    ("target", "given", "has_key"),
    [
        ("http://llm:8000", "http://llm:8000", True),
        ("http://llm:8000/v1", "http://llm:8000", True),
        ("http://llm:8001", "http://llm:8000", False),
        ("https://llm:8000", "http://llm:8000", False),
        ("http://llm:8000", "", False),
        ("http://llm:8000", "mock", False),
        ("http://llm:8000", "target.yaml", False),
        ("target.yaml", "target.yaml", True),
        ("mock", "http://llm:8000", True),
    ],
)
def test_the_key_is_for_the_server_of_the_command_line(target, given, has_key):
    kept = environ_for(target, given, {"OPENAI_API_KEY": KEY, "PATH": "/bin"})
    assert kept == {"PATH": "/bin", **({"OPENAI_API_KEY": KEY} if has_key else {})}


@pytest.mark.parametrize(
    "changed",
    [
        lambda assign: {"salt": b"other"},
        lambda assign: {"scenario": assign.scenario.replace("name: ", "seed: 8\nname: ")},
        lambda assign: {"adapter": {**assign.adapter, "model": "another"}},
    ],
)
def test_another_prompt_seed_or_model_has_another_fingerprint(changed):
    (one,) = assignments(job(), 1)
    assign, data = travelled(one)
    other = msgspec.structs.replace(assign, **changed(assign))
    task = task_of(other, data, {"OPENAI_API_KEY": KEY}, None, Path("p"))
    assert fingerprint(task) != one.sha256


def test_rows_that_cannot_be_decoded_are_rejected():
    (one,) = assignments(job(), 1)
    with pytest.raises(RunInvalid, match="rows of the share"):
        task_of(one.assign, b"no rows", {"OPENAI_API_KEY": KEY}, None, Path("p"))
