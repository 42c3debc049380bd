"""Payloads of sessions: written when their words are known, with priority and tenant."""

import json
import uuid

import numpy as np

from loadgen.drive.payloads import HttpHead, Payloads
from loadgen.records import SCHEDULE
from loadgen.workload.prompts import RenderedPrompt
from targets.openai_chat import OpenAIChat

HEAD = HttpHead("host:1", "", ())


def test_a_key_is_taken_out_also_where_an_excerpt_ends_inside_it():
    head = HttpHead("host:1", "", (("authorization", "Bearer sk-do-not-show-me"),))
    assert head.redact("bad key sk-do-not-show-me") == "bad key [redacted]"
    assert "sk-do" not in head.redact('{"detail":"bad key sk-do-not-sh…')
    assert head.redact("") == ""


def test_a_run_may_be_called_anything():
    talk = Talk(is_real=False)
    named = Payloads(plan(1), talk.ask, OpenAIChat(model="m"), HEAD, "läuft 日本\r\nx: y")
    head = named.take(0).partition(b"\r\n\r\n")[0]
    namespace = uuid.uuid5(uuid.NAMESPACE_URL, "läuft 日本\r\nx: y")
    own_id = uuid.uuid5(namespace, "10")
    assert f"x-request-id: {own_id}".encode() in head.split(b"\r\n")


def test_the_query_of_the_base_ends_the_path():
    head = HttpHead("h", "/d", (), (), "?api-version=1&a={b}")
    made = Payloads(plan(1), Talk(is_real=False).ask, OpenAIChat(version=""), head, "run")
    assert made.take(0).startswith(b"POST /d/chat/completions?api-version=1&a={b} HTTP/1.1\r\n")


def test_each_header_is_sent_once_and_the_target_file_has_the_last_word():
    headers = (("Accept", "*/*"), ("X-Tenant", "blue"))
    talk = Talk(is_real=False)
    made = Payloads(plan(1), talk.ask, OpenAIChat(model="m"), HttpHead("h", "", headers), "run")
    lines = made.take(0).partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
    names = [line.partition(":")[0].lower() for line in lines]
    assert sorted(names) == sorted(set(names))
    assert "accept: */*" in lines


def test_session_headers_name_the_session_alike_in_all_its_requests():
    rows = plan(3)
    rows["session_id"] = [4, 4, 5]
    head = HttpHead("h", "", (), session_headers=("x-session-id", "x-router"))
    made = Payloads(rows, Talk(is_real=False).ask, OpenAIChat(model="m"), head, "a-run")
    heads = [made.take(row).partition(b"\r\n\r\n")[0].decode() for row in range(3)]
    namespace = uuid.uuid5(uuid.NAMESPACE_URL, "a-run")
    names = [uuid.uuid5(namespace, f"session {k}") for k in (4, 4, 5)]
    for name, lines in zip(names, heads, strict=True):
        assert f"x-session-id: {name}" in lines.split("\r\n")
        assert f"x-router: {name}" in lines.split("\r\n")


def plan(n=3, tokens=10):
    rows = np.zeros(n, SCHEDULE)
    rows["request_id"] = 10 + np.arange(n)
    rows["scheduled_s"] = [0.0] + [np.nan] * (n - 1)
    rows["n_parents"] = [0] + [1] * (n - 1)
    rows["input_tokens"], rows["output_tokens"] = tokens, 5
    return rows


class Talk:
    """Row k quotes the answer to row k − 1; counts how often each row is written."""

    def __init__(self, is_real=True):
        self.is_real, self.written = is_real, []

    def ask(self, row, answer, reasoning):
        self.written.append(row)
        return RenderedPrompt(f"{row} after {reasoning}{answer}")

    def waits_for(self, row):
        return row - 1 if self.is_real and row else None


def payloads(rows, talk, **more):
    return Payloads(rows, talk.ask, OpenAIChat(model="m"), HEAD, "run", **more)


def said(payload):
    return json.loads(payload.partition(b"\r\n\r\n")[2])


def content(payload):
    return said(payload)["messages"][-1]["content"]


def test_a_turn_is_written_when_its_answer_is_known_and_not_before():
    talk = Talk()
    made = payloads(plan(), talk, waits_for=talk.waits_for)
    assert made.extend() is False
    assert talk.written == [0]
    made.prepare(1)
    assert talk.written == [0], "the answer is not known yet"
    made.take(0)
    made.answered(0, lambda: ("hello", "hm"))
    made.prepare(1)
    assert talk.written == [0, 1]
    assert content(made.take(1)) == "1 after hmhello"
    assert made.n_late == 0


def test_a_turn_that_is_due_at_once_is_written_on_the_spot_and_counted():
    talk = Talk()
    made = payloads(plan(), talk, waits_for=talk.waits_for)
    made.answered(0, lambda: ("quick", ""))
    assert content(made.take(1)) == "1 after quick"
    assert made.n_late == 1
    made.prepare(1)
    assert talk.written == [1], "what was sent is not written again"


def test_an_answer_is_read_only_when_it_is_needed():
    talk, read = Talk(), iter(["x"])
    made = payloads(plan(), talk, waits_for=talk.waits_for)
    made.answered(0, lambda: (next(read), ""))
    assert next(read, "") == "x", "answered read it"
    made.answered(0, lambda: ("y", ""))
    made.prepare(1)
    assert content(made.take(1)) == "1 after y"


def test_short_scripted_schedules_are_all_written_ahead():
    talk = Talk(is_real=False)
    made = payloads(plan(), talk)
    made.extend()
    assert talk.written == [0, 1, 2]


def test_in_long_schedules_a_scripted_turn_is_written_when_its_parent_is_sent():
    talk = Talk(is_real=False)
    made = payloads(plan(tokens=120_000_000), talk)
    made.extend()
    assert talk.written == [0]
    made.prepare(1)
    assert content(made.take(1)) == "1 after None"
    assert made.n_late == 0


def test_priority_tenant_and_temperature_are_those_of_the_row():
    rows = plan()
    rows["priority"], rows["tenant_id"], rows["temperature"] = [2, -1, 0], [1, 0, 1], 0.7
    talk = Talk(is_real=False)
    made = payloads(rows, talk, tenants=("", "web"))
    bodies = [said(made.take(row)) for row in range(3)]
    assert [body.get("priority") for body in bodies] == [2, -1, None]
    assert [body.get("tenant") for body in bodies] == ["web", None, "web"]
    assert [body["temperature"] for body in bodies] == [0.7] * 3


def test_a_promise_of_its_own_is_told_to_a_server_that_schedules_by_it():
    rows = plan(1)
    rows["ttft_slo_s"], rows["e2e_slo_s"] = 0.3, 4.5
    talk = Talk(is_real=False)
    knows = OpenAIChat(model="m", sends_slos=True)
    bodies = [
        said(Payloads(rows, talk.ask, adapter, HEAD, "run").take(0))
        for adapter in (knows, OpenAIChat(model="m"))
    ]
    told, silent = ({k: v for k, v in b.items() if k.endswith("_ms")} for b in bodies)
    assert told == {"ttft_slo_ms": 300.0, "deadline_ms": 4500.0}
    assert silent == {}


def test_what_a_class_was_promised_is_told_where_a_request_brings_nothing_of_its_own():
    rows = plan(3)
    rows["class_id"] = [0, 1, 1]
    rows["ttft_slo_s"][2] = 0.3
    talk = Talk(is_real=False)
    knows = OpenAIChat(model="m", sends_slos=True)
    limits_s = ((None, None, None), (2.0, None, 8.0))
    made = Payloads(rows, talk.ask, knows, HEAD, "run", slo_limits_s=limits_s)
    told = [
        {k: v for k, v in said(made.take(row)).items() if k.endswith("_ms")} for row in range(3)
    ]
    assert told == [
        {},
        {"ttft_slo_ms": 2000.0, "deadline_ms": 8000.0},
        {"ttft_slo_ms": 300.0, "deadline_ms": 8000.0},
    ]


def test_rows_that_are_not_written_before_the_start_come_late():
    scripted, real = Talk(is_real=False), Talk()
    short = payloads(plan(), scripted, waits_for=scripted.waits_for)
    long = payloads(plan(tokens=120_000_000), scripted, waits_for=scripted.waits_for)
    quoting = payloads(plan(), real, waits_for=real.waits_for)
    assert [short.comes_late(row) for row in range(3)] == [False, False, False]
    assert [long.comes_late(row) for row in range(3)] == [True, True, True]
    assert [quoting.comes_late(row) for row in range(3)] == [False, True, True]
