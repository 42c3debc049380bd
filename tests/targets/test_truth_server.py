"""The truth server follows its script and logs it correctly: checked by the bytes that the standard
library's HTTP client reads, and by the clock."""

import http.client
import json
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from loadgen.errors import MissingDependency, UsageError
from loadgen.system.c_programs import find_compiler
from targets.truth_log import TRUTH, TruthLog
from targets.truth_server import PROGRAM, TruthScript, truth_program, truth_server

FAST = {"ttft_s": 0.002, "itl_s": 0.0005}


@pytest.fixture
def truth(tmp_path, truth_cache):
    """`truth(**script)`: a running server."""

    def start(**script):
        return truth_server(tmp_path, cache_dir=truth_cache, **{**FAST, **script})

    return start


def body(max_tokens=4, **fields):
    requested = {
        "model": "m",
        "messages": [{"role": "user", "content": "abcd" * 10}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
    }
    return json.dumps(requested | fields)


class Client:
    """One kept-alive connection."""

    def __init__(self, url):
        host, port = url.removeprefix("http://").split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=5)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()

    def send(self, text=None, seq=None, path="/v1/chat/completions"):
        """(status, the events or the JSON body)."""
        headers = {} if seq is None else {"x-seq": str(seq)}
        self.connection.request("POST", path, text or body(), headers)
        response = self.connection.getresponse()
        data = response.read()
        if response.headers.get_content_type() != "text/event-stream":
            return response.status, json.loads(data)
        events = data.decode().removesuffix("\n\n").split("\n\n")
        return response.status, [event.removeprefix("data: ") for event in events]


def deltas(events):
    return [json.loads(event) for event in events if event != "[DONE]"]


def words(events):
    """The text of every event that has any, in order."""
    choices = [c for d in deltas(events) for c in d.get("choices", [])]
    texts = [c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices]
    return [text for text in texts if text]


def test_a_stream_has_role_tokens_finish_usage_and_done(truth):
    with truth() as server, Client(server.url) as client:
        status, events = client.send(body(3), seq=7)
        log = server.finish()
    assert status == 200
    role, *tokens, finish, usage = deltas(events)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [t["choices"][0]["delta"]["content"] for t in tokens] == [" the", " model", " of"]
    assert finish["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    # 40 characters of prompt: 10 tokens, and 8 of the template
    assert usage["usage"] == {"prompt_tokens": 18, "completion_tokens": 3, "total_tokens": 21}
    assert events[-1] == "[DONE]"
    (row,) = log.rows
    assert (row["seq"], row["outcome"], row["sent_tokens"]) == (7, "ok", 3)


def test_the_log_holds_the_instants_of_every_token(truth):
    script = {"ttft_s": 0.02, "itl_s": 0.004}
    with truth(with_tokens=True, **script) as server, Client(server.url) as client:
        before_ns = time.monotonic_ns()
        client.send(body(5), seq=3)
        after_ns = time.monotonic_ns()
        log = server.finish()
    (row,) = log.rows_of([3])
    order = (
        "arrived_ns", "read_ns", "due_ns", "first_ns", "first_written_ns", "last_ns",
        "last_written_ns", "done_ns",
    )  # fmt: skip
    instants = [int(row[name]) for name in order]
    assert instants == sorted(instants)
    # The client may have all of it before the server looks at its clock again.
    assert before_ns < instants[0]
    assert row["last_ns"] < after_ns
    assert row["due_ns"] - row["read_ns"] == 20_000_000
    tokens_ns = log.tokens_ns(row)
    assert (tokens_ns[0], tokens_ns[-1]) == (row["first_ns"], row["last_ns"])
    late_ns = tokens_ns.astype(np.int64) - (int(row["due_ns"]) + 4_000_000 * np.arange(5))
    assert late_ns.min() >= 0
    assert late_ns.max() == row["late_max_ns"]
    assert late_ns.sum() == row["late_sum_ns"]


@pytest.mark.alone  # a machine that stalls hides the stalls of the script
def test_one_step_in_so_many_stalls_for_all_streams_and_moves_what_follows(truth):
    script = {"ttft_s": 0.001, "itl_s": 0.002, "stall_every": 20, "stall_s": 0.03}
    with truth(with_tokens=True, **script) as server:
        with Client(server.url) as client, Client(server.url) as other:
            streams = [(client, 1), (other, 2)]
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda stream: stream[0].send(body(100), seq=stream[1]), streams))
        log = server.finish()
    ends_ms = []
    for row in log.rows:
        instants_ms = 1e-6 * log.tokens_ns(row).astype(np.float64)
        within_ms = 4 + 2e-6 * float(row["late_max_ns"])  # of a busy machine
        after = 1 + np.flatnonzero(np.diff(instants_ms) > 15 + within_ms)
        # 99 gaps in a period of 20 steps and the stall
        assert len(after) in (4, 5)
        assert np.diff(instants_ms[after]) == pytest.approx(20 * 2 + 30, abs=within_ms)
        total_ms = 99 * 2 + 30 * len(after)
        assert np.ptp(instants_ms) == pytest.approx(total_ms, abs=10 + within_ms)
        ends_ms.append(instants_ms[after])
    n = min(map(len, ends_ms))
    assert ends_ms[0][:n] == pytest.approx(ends_ms[1][:n], abs=within_ms)


def test_a_stall_does_not_hold_first_tokens_back(truth):
    # 20 of every 25 ms are a stall: most requests arrive in one
    script = {"ttft_s": 0.004, "itl_s": 0.005, "stall_every": 1, "stall_s": 0.02}
    with truth(**script) as server, Client(server.url) as client:
        for seq in range(8):
            client.send(body(1), seq=seq)
        log = server.finish()
    assert (log.rows["due_ns"] - log.rows["read_ns"]).tolist() == [4_000_000] * 8


@pytest.mark.parametrize(
    ("script", "requested", "texts"),
    [
        ({"tokens_per_event": 2}, 5, [" the model", " of latency", " token"]),
        ({"burst": 2}, 3, [" the", " model", " of"]),
        ({"itl_s": 0.0}, 3, [" the", " model", " of"]),
        ({"itl_s": 0.0, "ttft_s": 0.0}, 2, [" the", " model"]),
        ({"default_tokens": 2}, None, [" the", " model"]),
    ],
)
def test_tokens_come_as_scripted(truth, script, requested, texts):
    with truth(**script) as server, Client(server.url) as client:
        _, events = client.send(body(requested))
    assert words(events) == texts


def test_a_burst_is_one_write_and_is_due_with_its_first_token(truth):
    script = {"burst": 3, "ttft_s": 0.01, "itl_s": 0.002, "role": "off"}
    with truth(with_tokens=True, **script) as server, Client(server.url) as client:
        client.send(body(7), seq=0)
        log = server.finish()
    tokens_ns = log.tokens_ns(log.rows[0])
    assert (np.diff(tokens_ns) == 0).tolist() == [True, True, False, True, True, False]
    due_ns = int(log.rows[0]["due_ns"]) + 2_000_000 * np.repeat([0, 3, 6], [3, 3, 1])
    assert (tokens_ns.astype(np.int64) >= due_ns).all()


@pytest.mark.parametrize("split", [{"split_bytes": 1}, {"split_bytes": 7, "split_gap_s": 20e-6}])
def test_a_split_stream_is_the_same_stream(truth, split):
    with truth() as server, Client(server.url) as client:
        whole = client.send(body(5))
    with truth(**split) as server, Client(server.url) as client:
        assert client.send(body(5)) == whole
        assert client.send(body(5))[0] == 200  # and the connection is still in step
        log = server.finish()
    assert (log.rows["first_written_ns"] > log.rows["first_ns"]).all()


def test_the_end_of_a_stream_can_be_left_out_merged_or_late(truth):
    with truth(done="off", usage="off", role="off", finish="merged") as server:
        with Client(server.url) as client:
            _, events = client.send(body(2))
        assert [d["choices"][0]["finish_reason"] for d in deltas(events)] == [None, "length"]
    with truth(usage_delay_s=0.03) as server, Client(server.url) as client:
        _, events = client.send(body(2), seq=0)
        log = server.finish()
    assert events[-1] == "[DONE]"
    assert log.rows["done_ns"] - log.rows["last_ns"] >= 30_000_000


def test_running_usage_counts_the_tokens_so_far(truth):
    requested = body(5, stream_options={"include_usage": True, "continuous_usage_stats": True})
    with truth(tokens_per_event=2) as server, Client(server.url) as client:
        _, events = client.send(requested)
    counts = [d["usage"]["completion_tokens"] for d in deltas(events)]
    assert counts == [0, 2, 4, 5, 5, 5]  # role, three events, finish, usage


def test_both_apis_answer_with_and_without_a_stream(truth):
    with truth() as server, Client(server.url) as client:
        _, whole = client.send(body(2, stream=False))
        assert whole["choices"][0]["message"]["content"] == " the model"
        requested = json.dumps({"prompt": "abcd", "stream": True, "max_tokens": 2})
        _, events = client.send(requested, path="/v1/completions")
        assert words(events) == [" the", " model"]
        assert not any("usage" in delta for delta in deltas(events))  # not requested
        assert client.send(path="/nothing")[0] == 404


def test_the_same_requests_fail_in_every_run(truth):
    """Statuses depend on x-seq, not on the order; shares are within 5 standard deviations."""

    def outcomes(order):
        script = {"ttft_s": 0.0, "itl_s": 0.0, "fail": ("429:0.2", "503:0.1"), "seed": 5}
        with truth(**script) as server, Client(server.url) as client:
            return {seq: client.send(body(1), seq=seq)[0] for seq in order}

    first = outcomes(range(200))
    assert outcomes(reversed(range(200))) == first
    assert abs(list(first.values()).count(429) - 40) < 5 * 5.7
    assert abs(list(first.values()).count(503) - 20) < 5 * 4.3


def test_an_error_may_come_in_the_stream_or_cut_it(truth):
    with truth(fail=("inband:1",)) as server, Client(server.url) as client:
        _, events = client.send(body(4))
        log = server.finish()
    assert words(events) == [" the", " model"]
    assert json.loads(events[-2])["error"]["code"] == 500
    assert (log.rows["outcome"][0], log.rows["sent_tokens"][0]) == ("inband", 2)
    with truth(fail=("cut:1",)) as server, Client(server.url) as client:
        with pytest.raises(http.client.IncompleteRead) as cut:
            client.send(body(4))
        log = server.finish()
    assert cut.value.partial.count(b"content") == 3  # the role and half of the tokens
    assert log.rows["outcome"][0] == "cut"


def test_requests_and_connections_can_be_reset_and_hang(truth):
    gone = pytest.raises(ConnectionError)
    for script in ({"fail": ("reset:1",)}, {"reset": 1.0}):
        with truth(**script) as server, Client(server.url) as client, gone:
            client.send()
    with truth(fail=("hang:1",)) as server, Client(server.url) as client:
        client.connection.timeout = 0.05
        with pytest.raises(TimeoutError):
            client.send()
        assert server.finish().rows["outcome"][0] == "hang"


def test_a_closed_port_refuses_and_opens_again(truth):
    with truth(refuse=0.5) as server:
        host, port = server.url.removeprefix("http://").split(":")
        states: list[bool] = []
        end_s = time.monotonic() + 10
        while states[-2:] != [True, False] and time.monotonic() < end_s:  # refused, then open again
            with socket.socket() as probe:
                is_refused = probe.connect_ex((host, int(port))) != 0
            if states[-1:] != [is_refused]:
                states.append(is_refused)
            os.sched_yield()
    assert states in ([False, True, False], [True, False])


def test_a_client_that_leaves_is_logged_as_aborted(truth):
    with truth(itl_s=0.05) as server:
        with Client(server.url) as client:
            client.connection.request("POST", "/v1/chat/completions", body(100), {"x-seq": "1"})
            client.connection.getresponse().read(10)
        log = server.finish()
    assert log.rows["outcome"][0] in ("aborted", "ok")  # ok: the end came before it was noticed
    assert log.rows["sent_tokens"][0] < 100


def test_connections_close_after_so_many_requests(truth):
    with truth(requests_per_connection=2) as server, Client(server.url) as client:
        for _ in range(4):
            client.send(body(1))
        log = server.finish()
    assert log.rows["connection"].tolist() == [0, 0, 1, 1]


def test_other_requests_have_their_answers(truth):
    with truth() as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 5) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nexpect: 100-continue\r\n")
            raw.sendall(b"content-length: 2\r\n\r\n")
            assert raw.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            raw.sendall(b"{}GET /v1/models HTTP/1.1\r\nconnection: close\r\n\r\n")
            answers = b""
            while more := raw.recv(65536):
                answers += more
            assert answers.count(b"HTTP/1.1 200 OK") == 2  # pipelined, in order
            assert answers.index(b'"text"') < answers.index(b'"max_model_len"')
        with socket.create_connection((host, int(port)), 5) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 411 ")


def test_the_server_and_its_client_run_on_cores_of_their_own(truth):
    before = os.sched_getaffinity(0)
    with truth() as server:
        assert os.sched_getaffinity(0) == before
        if server.cpu is None:
            assert len(before) == 1
            return
        assert os.sched_getaffinity(server.child.pid) == {server.cpu}
        with server.client_cores():
            assert server.cpu not in os.sched_getaffinity(0)
        assert os.sched_getaffinity(0) == before


def test_the_c_code_has_no_warnings(truth_cache):
    files = sorted(map(str, PROGRAM.sources.glob("*.c")))
    flags = ["-std=c11", "-D_GNU_SOURCE", "-fsyntax-only", "-Wall", "-Wextra", "-Wshadow"]
    command = [*find_compiler("", PROGRAM.what), *flags, "-Wconversion", *files]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.stderr == ""


def compiler(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_program_is_compiled_once_for_each_compiler(tmp_path):
    """The compiler is a script: it counts its calls and writes what follows -o."""
    cc = compiler(
        tmp_path / "cc",
        f"""[ "$1" = --version ] && {{ cat {tmp_path}/version; exit; }}
echo called >> {tmp_path}/calls
while [ "$1" != -o ]; do shift; done; echo program > "$2" """,
    )
    version, cache = tmp_path / "version", tmp_path / "cache"
    version.write_text("1.0")
    program = truth_program(cache, cc)
    assert program.read_text() == "program\n"
    assert truth_program(cache, cc) == program
    assert (tmp_path / "calls").read_text() == "called\n"
    version.write_text("1.1")
    assert truth_program(cache, cc) != program
    assert truth_program(cache, f"{cc} -g") != program


def test_without_a_compiler_the_error_names_the_package_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match=r"found none of cc, gcc, clang\): install gcc"):
        truth_program(tmp_path)
    with pytest.raises(MissingDependency, match="CC=tcc -O3 is not installed"):
        truth_program(tmp_path, "tcc -O3")


def test_a_failed_compilation_is_one_line(tmp_path):
    cc = compiler(tmp_path / "cc", "echo 'fatal error: stdio.h: no such file' >&2; exit 1")
    with pytest.raises(MissingDependency, match=r"stdio\.h: no such file; are the C library's"):
        truth_program(tmp_path, cc)
    assert [path.name for path in tmp_path.iterdir()] == ["cc"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"ttf_s": 1.0}, "unknown truth server option 'ttf_s'; did you mean"),
        ({"fail": ("4x9:0.1",)}, "truthd: --fail 4x9: expected a number from 400 to 599"),
        ({"fail": ("cut:0.7", "hang:0.7")}, "truthd: --fail: the shares add up to 1[.]4"),
        ({"itl_s": 0.0, "stall_every": 5}, "truthd: --stall-every 5: needs steps"),
        ({"role": "erly"}, "truthd: --role erly: expected one of first, early, off"),
    ],
)
def test_a_wrong_option_is_named(truth, script, message):
    with pytest.raises(UsageError, match=message), truth(**script):
        pass


def test_help_lists_every_option(truth_cache):
    help_text = subprocess.run(
        [truth_program(truth_cache), "--help"], capture_output=True, text=True, check=True
    ).stdout
    for word in TruthScript(fail=("cut:1",)).arguments()[::2]:
        assert f"{word} " in help_text


def test_a_log_is_joined_by_request():
    rows = np.zeros(3, TRUTH)
    rows["seq"], rows["number"] = [4, 9, 4], [0, 1, 2]
    log = TruthLog(rows)
    assert log.rows_of([9, 4])["number"].tolist() == [1, 2]  # the last of two with one number
    with pytest.raises(KeyError, match="request 5 is not in"):
        log.rows_of([4, 5])
    with pytest.raises(KeyError, match="request 0"):
        TruthLog(rows[:0]).rows_of([0])
    assert len(TruthLog(rows[:0]).rows_of([])) == 0


def test_every_source_file_is_shipped():
    listed = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'targets = ["truth/*"]' in listed
