"""The preflight against a mock server with every scripted failure."""

import asyncio
import socket
import ssl
import subprocess

import pytest

from loadgen.errors import TargetError
from targets.base import Adapter
from targets.embed import mock
from targets.endpoint import read_target
from targets.openai_chat import OpenAIChat
from targets.openai_completions import OpenAICompletions
from targets.preflight import preflight
from targets.preflight_result import (
    CHECKS,
    FieldChange,
    Longest,
    RunRequest,
    after_rejection,
    two_point_fit,
)
from targets.probe_request import EventReader, _is_bundled, connect_problem, parse_models
from targets.safe_text import error_message

TEXT = "many words of the workload's own text " * 200


def run_preflight(
    url, script="", *, lines="", environ=None, timeout_s=5.0, tokens=(100, 50), **how
):
    header = f"headers: {{x-mock: '{script}'}}\n" if script else ""
    endpoint = read_target(f"url: {url}\n{header}{lines}", "t.yaml", environ or {})
    return asyncio.run(
        preflight(
            endpoint,
            endpoint.adapter(),
            max_input_tokens=tokens[0],
            max_output_tokens=tokens[1],
            timeout_s=timeout_s,
            text_of=lambda n_chars: TEXT[:n_chars],
            **how,
        )
    )


def check(result, name):
    return next(check for check in result.checks if check.check == name)


def test_a_recorded_prompt_beyond_the_context_is_named_by_its_place(tmp_path):
    with mock({"max_model_len": "4096", "ttft": "1ms", "itl": "0ms"}, tmp_path) as served:
        url = served.endpoint.url
        over = run_preflight(url, longest=Longest(4000, 97, "chat.jsonl:17"))
        fits = run_preflight(url, tokens=(4000, 4000), longest=Longest(4000, 96))
    assert "chat.jsonl:17 needs 4000 + 97 tokens and 'mock-model' takes 4096: remove" in over.fatal
    assert fits.fatal is None


def test_a_healthy_server_passes_every_check(mock_url):
    result = run_preflight(mock_url, "max_model_len=4096").or_raise()
    assert [c.check for c in result.checks] == list(CHECKS)
    open_ones = {c.check for c in result.checks if not c.ok}
    # The list of models states no length, and these requests belong to no run.
    assert open_ones - {"streaming"} == {"max_model_len", "run_requests"}
    assert check(result, "streaming").ok is not False  # None: a busy machine had all in one read
    assert result.model == "mock-model"
    assert result.adapter.continuous_usage
    assert (result.adapter.ignore_eos, check(result, "ignore_eos").ok) == (True, True)
    assert "on every chunk" in check(result, "usage").detail


def test_only_our_own_servers_receive_the_slos_of_a_request(mock_url):
    """The mock names slobench as its owner, as the bundled engine does; other servers do not."""
    assert run_preflight(mock_url).adapter.sends_slos
    assert not _is_bundled(b'{"data": [{"id": "m", "owned_by": "vllm"}, {"id": "n"}]}')


def test_both_apis_pass_and_are_fitted(mock_url):
    chat = run_preflight(mock_url)
    assert chat.fit == pytest.approx((8.0, 0.25))
    completions = run_preflight(mock_url, lines="api: completions")
    assert isinstance(completions.adapter, OpenAICompletions)
    assert completions.fit == pytest.approx((0.0, 0.25), abs=0.01)


@pytest.mark.parametrize(
    ("script", "name", "message"),
    [
        ("fail=500", "completion", "answered 500: scripted failure 500; see the server's log"),
        ("fail=401", "completion", "answered 401: no API key was sent; export OPENAI_API_KEY=…"),
        ("fail=403", "completion", "answered 403: no API key was sent"),
        (
            "fail=404",
            "completion",
            "POST /v1/chat/completions answered 404: scripted failure 404; POST /chat/completions "
            "is absent too; check the URL and api: chat",
        ),
        ("fail=402", "completion", "answered 402: scripted failure 402; the account does not pay"),
        ("fail=503", "completion", "answered 503: scripted failure 503; --wait-ready 5m waits"),
        ("fail=429", "completion", "answered 429: scripted failure 429; a rate limit"),
        ("fail=cut", "completion", "the connection was cut after 8 tokens"),
        ("fail=reset", "completion", "the connection was closed without an answer"),
        ("fail=utf8", "completion", "not an event of this API: 'utf-8' codec"),
        ("fail=inband", "completion", "an error in the stream: scripted failure in mid-stream"),
        ("finish=abort", "completion", "an error in the stream: finish_reason abort"),
        ("fail=notsse", "streaming", "answered text/html, not an event stream"),
        ("reject=messages", "completion", "Unrecognized request argument supplied: messages"),
    ],
)
def test_a_server_that_cannot_be_measured_is_one_line(mock_url, script, name, message):
    result = run_preflight(mock_url, script)
    assert (check(result, name).ok, check(result, name).is_stop) == (False, True)
    assert result.fatal.startswith(f"{mock_url}: ")
    assert message in result.fatal
    assert "\n" not in result.fatal
    after = CHECKS[CHECKS.index(name) + 1 :]
    assert {check(result, later).ok for later in after} == {None}
    with pytest.raises(TargetError, match="http://127"):
        result.or_raise()


def test_a_server_that_never_answers_is_left_at_the_deadline(mock_url):
    result = run_preflight(mock_url, "fail=hang", timeout_s=0.3)
    assert "did not answer within 0.3 s; is the model loaded" in result.fatal


def test_a_server_that_stops_in_mid_stream_is_left_at_the_deadline(mock_url):
    result = run_preflight(mock_url, "itl=60s", timeout_s=0.3)
    assert "stopped after 1 tokens within 0.3 s" in result.fatal


def test_a_server_that_fails_now_and_then_may_still_be_measured(tmp_path):
    # This seed fails request 0 and no other of the first ten: the attempt after it succeeds.
    with mock({"fail": "500:10%", "seed": "39", "ttft": "1ms", "itl": "0ms"}, tmp_path) as served:
        result = run_preflight(served.endpoint.url)
    assert result.fatal is None
    assert "1 earlier attempt failed" in check(result, "completion").detail


@pytest.mark.parametrize(
    ("script", "field", "value"),
    [
        ("reject=ignore_eos", "ignore_eos", False),
        ("reject=min_tokens", "min_tokens", False),
        ("reject=temperature", "sends_temperature", False),
        ("reject=continuous_usage_stats", "continuous_usage", False),
        ("reject=stream_options", "include_usage", False),
        ("reject=max_tokens", "limit_field", "max_completion_tokens"),
        ("usage=off", "continuous_usage", False),
    ],
)
def test_a_rejected_field_is_not_sent_again(mock_url, script, field, value):
    result = run_preflight(mock_url, script)
    assert result.fatal is None
    assert getattr(result.adapter, field) == value
    others = {"ignore_eos", "min_tokens", "include_usage", "sends_temperature"} - {field}
    assert all(getattr(result.adapter, other) for other in others)


def test_without_ignore_eos_lengths_are_upper_limits(mock_url):
    result = run_preflight(mock_url, "reject=ignore_eos,eos_after=4")
    assert check(result, "ignore_eos").ok is None
    assert "upper limits" in check(result, "ignore_eos").detail
    assert check(result, "finish_reason").detail == "stop"
    assert not result.adapter.ignore_eos


def test_lengths_that_the_extra_body_leaves_open_are_upper_limits(mock_url):
    result = run_preflight(mock_url, lines="extra_body: {ignore_eos: null, min_tokens: null}\n")
    assert check(result, "ignore_eos").ok is None
    assert "upper limits" in check(result, "ignore_eos").detail


def test_answers_that_are_not_streamed_pass_as_a_whole(mock_url):
    result = run_preflight(mock_url, lines="stream: false\n").or_raise()
    assert (check(result, "streaming").ok, check(result, "usage").ok) == (None, True)
    assert check(result, "ignore_eos").ok is True
    assert check(result, "completion").detail.startswith("whole in")
    assert not result.adapter.stream
    assert result.fit is not None


class AlwaysStreaming(OpenAIChat):
    """Requests a stream, as a server does that ignores `stream: false`."""

    def encode(self, request):
        return OpenAIChat(model=self.model).encode(request)


def test_a_server_that_streams_nevertheless_is_refused(mock_url):
    endpoint = read_target(f"url: {mock_url}\nstream: false\n", "t.yaml", {})
    result = asyncio.run(
        preflight(
            endpoint,
            AlwaysStreaming(model="mock-model", stream=False),
            max_input_tokens=9,
            max_output_tokens=9,
        )
    )
    assert "not a whole answer; it starts 'data: " in (result.fatal or "")


def test_without_usage_there_is_no_fit_and_tokens_are_counted_by_chunks(mock_url):
    result = run_preflight(mock_url, "usage=off")
    assert result.fatal is None
    assert result.fit is None
    assert "counted by chunks" in check(result, "usage").detail


@pytest.mark.parametrize(("usage", "tokens"), [("zero", 0), ("half", 8), ("tenfold", 160)])
def test_usage_that_cannot_be_true_is_a_warning(mock_url, usage, tokens):
    result = run_preflight(mock_url, f"usage={usage}")
    assert result.fatal is None
    assert check(result, "usage").ok is False
    words = f"states {tokens} tokens of an answer of 16 chunks, which cannot be"
    assert words in check(result, "usage").detail
    # 16 chunks show that the length is exact
    assert check(result, "ignore_eos").ok is True
    assert check(result, "ignore_eos").detail.endswith("by 16 chunks")


def test_exact_lengths_are_stated_only_where_a_count_shows_them(mock_url):
    coarse = run_preflight(mock_url, "usage=off,coalesce=4")
    assert check(coarse, "ignore_eos").ok is None
    assert "4 chunks of unknown size came" in check(coarse, "ignore_eos").detail


def test_a_stream_in_one_chunk_is_not_a_stream(mock_url):
    result = run_preflight(mock_url, "coalesce=64")
    assert check(result, "streaming").ok is False
    assert result.fatal is None


def test_an_early_role_chunk_is_no_token(mock_url):
    # tokens 20 ms apart: a busy machine cannot deliver all of them in one read
    result = run_preflight(mock_url, "role=early,ttft=40ms,itl=20ms")
    detail = check(result, "streaming").detail
    assert detail.startswith("16 chunks")
    assert float(detail.split()[-2]) >= 0.04


def test_an_unknown_model_is_reported_with_the_nearest_name(mock_url):
    result = run_preflight(mock_url, lines="model: mock-modle")
    assert "model 'mock-modle' is not served; did you mean 'mock-model'?" in result.fatal
    assert check(result, "models").ok is False


def test_keys_and_lengths_are_checked_against_the_server(tmp_path):
    options = {"api_key": "right", "max_model_len": "120", "ttft": "1ms", "itl": "0ms"}
    with mock({**options, "model": "a-model;b-model"}, tmp_path) as served:
        url = served.endpoint.url
        fits = (60, 60)
        none = run_preflight(url, tokens=fits)
        wrong = run_preflight(url, environ={"OPENAI_API_KEY": "wrong"}, tokens=fits)
        named = run_preflight(url, lines="api_key_env: GW", environ={"GW": "wrong"}, tokens=fits)
        long = run_preflight(url, environ={"OPENAI_API_KEY": "right"})
        fine = run_preflight(url, environ={"OPENAI_API_KEY": "right"}, tokens=fits)
        assert "right" not in repr(served)
    assert "no API key was sent; export OPENAI_API_KEY=…" in none.fatal
    assert "the API key in OPENAI_API_KEY is refused" in wrong.fatal
    assert "the API key in GW is refused" in named.fatal
    assert "a-model: the scenario needs up to 100 + 50 tokens and 'a-model' takes 120" in long.fatal
    assert fine.fatal is None
    assert check(fine, "models").detail == (
        "a-model, the first of 2 that answers; choose with --model"
    )
    assert fine.max_model_len == 120


def test_a_model_that_does_not_chat_is_not_chosen(tmp_path):
    models = {"model": "bge-m3;llama", "mute_model": "bge-m3", "ttft": "1ms", "itl": "0ms"}
    with mock(models, tmp_path) as served:
        result = run_preflight(served.endpoint.url).or_raise()
        named = run_preflight(served.endpoint.url, lines="model: bge-m3")
    assert result.model == "llama"
    detail = check(result, "models").detail
    assert detail.startswith("llama, the first of 2 that answers (bge-m3: answered 400: ")
    assert detail.endswith("; choose with --model")
    assert result.adapter.ignore_eos  # nothing that the other model refused is left out
    assert result.adapter.continuous_usage
    assert "does not support chat" in named.fatal


def test_models_of_which_none_answers_are_all_named(tmp_path):
    models = {"model": "bge-m3;e5", "mute_model": "bge-m3;e5", "ttft": "1ms", "itl": "0ms"}
    with mock(models, tmp_path) as served:
        result = run_preflight(served.endpoint.url)
    assert "none of the 2 listed models answers POST /v1/chat/completions (bge-m3: " in result.fatal
    assert "; e5: answered 400" in result.fatal
    assert check(result, "models").is_stop


def test_a_stated_length_is_checked_before_any_completion(tmp_path):
    with mock({"max_model_len": "12"}, tmp_path) as served:
        result = run_preflight(served.endpoint.url)
    assert "up to 100 + 50 tokens and 'mock-model' takes 12: lower" in result.fatal
    assert check(result, "max_model_len").ok is False
    assert check(result, "completion").detail == "not checked"


def test_a_refused_longer_prompt_leaves_the_completion_as_a_point_of_the_fit(mock_url):
    # The completion is 8 + 19 prompt tokens and 16 more; 128 characters are 8 + 32 and 1 more;
    # 256 characters, the longer prompt's least, would be 8 + 64.
    result = run_preflight(mock_url, "max_model_len=50")
    assert result.fatal is None
    assert result.fit == pytest.approx((8.0, 0.25))


def test_a_refused_connection_is_reported_as_such():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for host in ("127.0.0.1", "localhost"):
        result = run_preflight(f"http://{host}:{port}")
        assert result.fatal == (
            f"http://{host}:{port}: connection refused; is the server running, and is the port "
            "right? --wait-ready 10m waits for a server that is starting"
        )
        assert [c.ok for c in result.checks] == [False] + [None] * (len(CHECKS) - 1)


@pytest.mark.faults
def test_https_to_a_server_without_tls_is_reported_as_such(mock_url):
    result = run_preflight(mock_url.replace("http", "https"))
    assert "does not speak TLS" in result.fatal
    assert "write http:// instead" in result.fatal


@pytest.mark.faults
def test_an_untrusted_certificate_can_be_named_and_a_missing_s_in_the_url_is_found(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    try:
        subprocess.run(
            [*made.split(), "-keyout", str(key), "-out", str(cert)],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the openssl command to make a certificate")
    options = {"ttft": "1ms", "itl": "0ms", "tls_cert": str(cert), "tls_key": str(key)}
    with mock({**options, "host": "localhost"}, tmp_path) as served:
        url = served.endpoint.url
        assert url.startswith("https://localhost:")
        assert (
            "its certificate is not trusted (self-signed certificate); name"
            in run_preflight(url).fatal
        )
        assert run_preflight(url, lines=f"ca_cert: {cert}").fatal is None
        plain = url.replace("https", "http")
        assert run_preflight(plain).fatal == (
            f"{plain}: the port speaks TLS; write https:// instead of http://"
        )


def test_a_server_on_a_socket_file_passes_every_check(tmp_path):
    path = tmp_path / "s.sock"
    with mock({"ttft": "2ms", "itl": "1ms", "unix": str(path)}, tmp_path) as served:
        assert served.endpoint.url == f"unix:{path}"
        result = run_preflight(served.endpoint.url).or_raise()
    assert [c.check for c in result.checks if not c.ok] == ["max_model_len", "run_requests"]
    gone = run_preflight(f"unix:{path}")
    assert gone.fatal == f"unix:{path}: no such socket file '{path}'; is the server running?"


def test_the_preflight_uses_the_proxy_of_the_environment(mock_url):
    """The mock accepts any path, so it can stand in for a forwarding proxy."""
    result = run_preflight(
        "http://nowhere.invalid", environ={"http_proxy": f"{mock_url}"}
    ).or_raise()
    assert f"through proxy {mock_url}" in check(result, "reachable").detail
    refused = run_preflight("http://nowhere.invalid", environ={"http_proxy": "http://127.0.0.1:9"})
    assert "refused by proxy http://127.0.0.1:9; is it running?" in str(refused.fatal)
    unknown = run_preflight("http://h", environ={"http_proxy": "http://nowhere.invalid:1"})
    assert "no such proxy 'nowhere.invalid'" in str(unknown.fatal)


def test_each_reason_for_no_connection_reads_differently():
    endpoint = read_target("url: http://nowhere.example:81", "t.yaml", {})
    errors = [
        socket.gaierror(-2, "Name or service not known"),
        TimeoutError(),
        ConnectionRefusedError(111, "Connect call failed"),
        OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 9, 0, 0)"),
        ssl.SSLError(1, "wrong version number"),
        OSError(113, "No route to host"),
    ]
    reasons = [connect_problem(error, endpoint, 2.0) for error in errors]
    assert "no such host 'nowhere.example'" in reasons[0]
    assert "no connection within 2 s" in reasons[1]
    assert reasons[2] == reasons[3]
    assert "No route to host" in reasons[5]
    assert len(set(reasons)) == 5


def test_a_field_that_a_rejection_names_is_dropped_first():
    adapter = OpenAIChat(continuous_usage=True)
    assert after_rejection(adapter, 500, "ignore_eos") is None
    named = after_rejection(adapter, 400, "unknown field min_tokens")
    assert named == FieldChange("min_tokens", False, True)
    unnamed = after_rejection(adapter, 422, "no idea")
    assert unnamed == FieldChange("continuous_usage", False, False)


def test_without_a_named_field_each_is_changed_in_order():
    adapter: Adapter = OpenAIChat(continuous_usage=True)
    steps = []
    while change := after_rejection(adapter, 400, "bad request"):
        steps.append(change.field)
        adapter = adapter.model_copy(update={change.field: change.value})
    assert steps == [
        "continuous_usage",
        "ignore_eos",
        "include_usage",
        "sends_temperature",
        "limit_field",
    ]
    assert (
        after_rejection(
            OpenAICompletions(include_usage=False, ignore_eos=False, sends_temperature=False),
            400,
            "no",
        )
        is None
    )


def test_a_server_that_refuses_several_fields_is_measured_without_them(mock_url):
    """As hosted reasoning models do: one refusal names one field."""
    script = ",".join(f"reject={f}" for f in ("ignore_eos", "temperature", "max_tokens"))
    result = run_preflight(mock_url, script, temperature=0.0).or_raise()
    assert check(result, "fields").ok is False
    assert check(result, "fields").detail == (
        "refused and not sent: ignore_eos, temperature (the server's default applies); "
        "max_completion_tokens replaces max_tokens"
    )


def test_the_temperature_of_the_scenario_is_sent(mock_url):
    """A strict server accepts its only temperature, 1."""
    strict = run_preflight(mock_url, "reject=temperature!=1", temperature=0.7)
    same = run_preflight(mock_url, "reject=temperature!=1", temperature=1.0)
    assert not strict.adapter.sends_temperature
    assert same.adapter.sends_temperature
    assert check(same, "fields").detail == "all accepted"


def test_a_guess_that_was_right_stays_left_out(mock_url):
    script = "reject=ignore_eos,reject=temperature,refusal=silent"
    result = run_preflight(mock_url, script).or_raise()
    assert (result.adapter.ignore_eos, result.adapter.sends_temperature) == (False, False)
    assert result.adapter.include_usage
    assert result.adapter.continuous_usage


def run_request(lengths, *fields):
    """A request of a run, with `fields` in its head."""
    body = b'{"messages":[{"content":"p"}],"max_tokens":2,"stream":true}'
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: h",
        f"content-length: {len(body)}",
        *fields,
    ]
    return RunRequest(lengths, "\r\n".join([*head, "", ""]).encode() + body)


def test_the_requests_of_the_run_are_sent_as_they_are(mock_url):
    own = [run_request("1 + 2 tokens"), run_request("9 + 9 tokens", "x-mock: itl=60s")]
    result = run_preflight(mock_url, requests_of=lambda adapter: own).or_raise()
    assert check(result, "run_requests").ok is True  # and an answer of a minute was not awaited
    assert check(result, "run_requests").detail == "accepted, of 1 + 2 tokens and 9 + 9 tokens"


def test_a_run_whose_ordinary_request_is_refused_does_not_start(mock_url):
    own = [run_request("1 + 2 tokens", "x-mock: request_id=uuid", "x-request-id: run-1")]
    result = run_preflight(mock_url, requests_of=lambda adapter: own)
    assert (
        "the run's requests are refused, the preflight's were not: a request of 1 + 2 tokens "
        "answered 400: Invalid UUID in request header X-Request-ID"
    ) in result.fatal
    assert check(result, "run_requests").is_stop


def test_a_refused_longest_request_is_a_warning(mock_url):
    own = [run_request("1 + 2 tokens"), run_request("9 + 9 tokens", "x-mock: max_model_len=1")]
    result = run_preflight(mock_url, requests_of=lambda adapter: own).or_raise()
    assert check(result, "run_requests").ok is False
    assert "of 9 + 9 tokens answered 400: maximum context" in check(result, "run_requests").detail


def test_a_full_server_does_not_refuse_the_run(mock_url):
    own = [run_request("1 + 2 tokens", "x-mock: fail=429")]
    result = run_preflight(mock_url, requests_of=lambda adapter: own).or_raise()
    assert "answered 429" in check(result, "run_requests").detail


def test_the_last_refusal_is_the_reason(mock_url):
    result = run_preflight(mock_url, "reject=ignore_eos,reject=messages")
    assert "supplied: messages" in result.fatal
    assert "ignore_eos" not in result.fatal


def test_a_field_left_out_by_guess_is_sent_again(mock_url):
    """The refusal names no field, so several are left out before the one that it is about."""
    result = run_preflight(mock_url, "reject=temperature,refusal=silent").or_raise()
    assert not result.adapter.sends_temperature
    assert result.adapter.ignore_eos
    assert result.adapter.continuous_usage
    assert result.fit == pytest.approx((8.0, 0.25))


def test_a_fit_needs_two_points_that_grow():
    assert two_point_fit((100, 33), (500, 133)) == pytest.approx((8.0, 0.25))
    assert two_point_fit(None, (500, 133)) is None
    assert two_point_fit((100, 33), (100, 40)) is None
    assert two_point_fit((100, 33), (500, 33)) is None


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":{"message":"too\\n long"}}', "too long"),
        (b'{"error":"plain"}', "plain"),
        (b'{"detail":"Unexpected keys"}', "Unexpected keys"),
        (b'{"detail":[{"loc":["body","x"]}]}', '[{"loc":["body","x"]}]'),
        (b"<html>\n oops", "<html> oops"),
        (b"", "an empty body"),
    ],
)
def test_the_message_of_an_error_body_is_shown(body, text):
    assert error_message(body) == text


def test_lengths_are_read_under_the_names_servers_use():
    body = b'{"data":[{"id":"a","max_model_len":8},{"id":"b","context_window":9},{"id":"c"}]}'
    assert parse_models(body) == {"a": 8, "b": 9, "c": None}
    with pytest.raises(ValueError, match="data"):
        parse_models(b"[]")


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_events_come_out_whole_wherever_the_bytes_are_cut(end):
    stream = end.join([b": hi", b"data: a", b"data: b", b"", b"id: 1", b"data:c", b"", b"data: d"])
    for cut in range(len(stream)):
        reader = EventReader()
        events = reader.feed(stream[:cut]) + reader.feed(stream[cut:])
        assert [event.data for event in events] == [b"a\nb", b"c"]


def test_events_have_their_names():
    stream = b"event: ping\ndata: {}\n\nevent: message\ndata: a\n\ndata: b\n\n"
    assert EventReader().feed(stream) == [(b"ping", b"{}"), (b"message", b"a"), (b"", b"b")]


def test_a_bare_json_line_is_data():
    assert EventReader().feed(b'{"error":"full"}\n\n') == [(b"", b'{"error":"full"}')]


def test_an_error_line_of_llamacpp_is_an_error_event():
    events = EventReader().feed(b'error: {"message":"slot unavailable","code":503}\n\n')
    assert [OpenAIChat().decode(event.data).error for event in events] == ["slot unavailable"]
