"""URLs and target files: valid forms, messages for mistakes, and secrets that stay hidden."""

import json
import logging
import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadgen.errors import TargetFileError
from targets.address import parse_url
from targets.base import Request
from targets.endpoint import Endpoint, load_target, read_target

SECRET = "sk-do-not-show-me"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/", "http://localhost:8000"),
        ("http://localhost:8000/v1", "http://localhost:8000"),
        ("http://localhost:8000/v1/", "http://localhost:8000"),
        ("http://localhost:8000/v1/chat/completions", "http://localhost:8000"),
        ("http://localhost:8000/v1/completions", "http://localhost:8000"),
        ("https://gw.example/llm/prod/v1", "https://gw.example/llm/prod"),
        ("https://gw.example:443", "https://gw.example"),
        ("http://gw.example:443", "http://gw.example:443"),
        ("HTTP://GW.example:80/v1", "http://gw.example"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("http://bücher.example", "http://xn--bcher-kva.example"),
        ("unix:/run/a.sock", "unix:/run/a.sock"),
        ("unix:///run/a.sock", "unix:/run/a.sock"),
        ("UNIX:here.sock", "unix:here.sock"),
        ("http+unix://%2Frun%2Fa.sock", "unix:/run/a.sock"),
        ("http+unix://%2Frun%2Fa.sock/v1/", "unix:/run/a.sock"),
        ("http+unix://%2Frun%2Fa.sock/base/v1", "http+unix://%2Frun%2Fa.sock/base"),
    ],
)
def test_every_form_of_a_base_url_yields_the_same_base(text, url):
    assert load_target(text, {}).url == url
    assert load_target(url, {}).url == url


DEPLOYMENT = "https://a.example/openai/deployments/d"


@pytest.mark.parametrize(
    ("text", "called", "models"),
    [
        ("http://h", "/v1/chat/completions", "/v1/models"),
        ("http://h/v1", "/v1/chat/completions", "/v1/models"),
        ("http://h/v1/chat/completions", "/v1/chat/completions", "/v1/models"),
        ("http://h/v1/chat/completions/", "/v1/chat/completions", "/v1/models"),
        ("http://h/v1/completions", "/v1/completions", "/v1/models"),
        ("http://h/chat/completions", "/chat/completions", "/models"),
        ("http://h/a/completions?b=1", "/a/completions?b=1", "/a/models?b=1"),
        (
            "http://h/a?b=1&c=d%20e",
            "/a/v1/chat/completions?b=1&c=d%20e",
            "/a/v1/models?b=1&c=d%20e",
        ),
        ("http://h/api/v3", "/api/v3/chat/completions", "/api/v3/models"),
        ("http://h/api/paas/v4/", "/api/paas/v4/chat/completions", "/api/paas/v4/models"),
        (
            "http://h/api/paas/v4/chat/completions",
            "/api/paas/v4/chat/completions",
            "/api/paas/v4/models",
        ),
        (
            "https://g.example/v1beta/openai/",
            "/v1beta/openai/chat/completions",
            "/v1beta/openai/models",
        ),
        (
            f"{DEPLOYMENT}?api-version=2025-01-01-preview",
            "/openai/deployments/d/chat/completions?api-version=2025-01-01-preview",
            "/openai/deployments/d/models?api-version=2025-01-01-preview",
        ),
        (
            f"{DEPLOYMENT}/chat/completions?api-version=2024-10-21",
            "/openai/deployments/d/chat/completions?api-version=2024-10-21",
            "/openai/deployments/d/models?api-version=2024-10-21",
        ),
        ("http+unix://%2Fa.sock/v1/completions", "/v1/completions", "/v1/models"),
        ("https://api.anthropic.com/v1/messages", "/v1/messages", "/v1/models"),
        ("https://h/responses", "/responses", "/models"),
        (
            "https://r.openai.azure.com/openai/v1/responses?api-version=preview",
            "/openai/v1/responses?api-version=preview",
            "/openai/v1/models?api-version=preview",
        ),
    ],
)
def test_a_pasted_url_is_called_as_it_is(text, called, models):
    endpoint = load_target(text, {})
    for again in (endpoint, load_target(endpoint.url, {})):
        address, version = again.address, again.address.versions[0]
        if again is not endpoint and endpoint.api != again.api:  # the file states it
            again = again.model_copy(update={"api": endpoint.api})
        path = again.adapter(model="m").encode(Request("hello", 1)).path
        assert address.path(path) == called
        assert address.path(f"{version}/models") == models


def test_a_pasted_endpoint_states_its_api():
    assert load_target("http://h/v1/completions", {}).api == "completions"
    assert load_target("http://h/v1/chat/completions?a=b", {}).api == "chat"
    assert load_target("http://h/v1/responses", {}).api == "responses"
    assert load_target("http://h/v1/messages", {}).api == "messages"
    with pytest.raises(TargetFileError, match="the URL is that of api chat"):
        read_target("url: http://h/v1/chat/completions\napi: completions\n", "t.yaml", {})


def test_anthropics_own_api_takes_the_key_as_x_api_key():
    hosted = load_target("https://api.anthropic.com/v1/messages", {"OPENAI_API_KEY": SECRET})
    assert hosted.request_headers() == (("x-api-key", SECRET),)
    own = load_target("http://h/v1/messages", {"OPENAI_API_KEY": SECRET})
    assert own.request_headers() == (("authorization", f"Bearer {SECRET}"),)


def test_an_azure_deployment_takes_the_key_as_api_key():
    endpoint = load_target(f"{DEPLOYMENT}?api-version=1", {"OPENAI_API_KEY": SECRET})
    assert endpoint.request_headers() == (("api-key", SECRET),)
    own = read_target(
        f"url: {DEPLOYMENT}?api-version=1\nheaders: {{Authorization: Bearer token-of-entra}}\n",
        "t.yaml",
        {"OPENAI_API_KEY": SECRET},
    )
    assert own.request_headers() == (("Authorization", "Bearer token-of-entra"),)


def test_a_key_in_a_query_is_sent_and_not_shown():
    endpoint = load_target(f"http://h/v1?v=2&key={SECRET}", {})
    assert endpoint.address.path("/v1/models") == f"/v1/models?v=2&key={SECRET}"
    assert endpoint.shown_url == "http://h?v=2&key=[redacted]"
    assert endpoint.to_manifest().to_json()["url"] == "http://h?v=2&key=[redacted]"
    assert endpoint.redact(f"no such path /v1?v=2&key={SECRET}") == (
        "no such path /v1?v=2&key=[redacted]"
    )


def test_an_address_gives_the_parts_of_a_connection():
    address = parse_url("https://gw.example/llm/v1")
    assert (address.scheme, address.host, address.port) == ("https", "gw.example", 443)
    assert address.ssl
    assert address.host_header == "gw.example"
    assert address.path("/v1/models") == "/llm/v1/models"
    file = parse_url("http+unix://%2Frun%2Fa.sock/base")
    assert (file.unix_path, file.host_header, file.http_url) == (
        "/run/a.sock", "localhost", "http://localhost/base",
    )  # fmt: skip
    plain = parse_url("http://[::1]:8000")
    assert (plain.host, plain.port, plain.ssl, plain.base_path) == ("::1", 8000, False, "")
    assert plain.host_header == "[::1]:8000"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("localhost:8000", "has no scheme; write http://localhost:8000"),
        ("", "has no scheme"),
        ("ftp://host", "scheme 'ftp' is neither http nor https"),
        ("http://a b", "contains white space"),
        ("http://a\n", "contains white space"),
        ("http://host:99999", "Port out of range"),
        ("http://host:0", "port 0"),
        ("http://host:http", "Port could not be cast"),
        ("http://", "has no host"),
        ("http:///v1", "has no host"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("http://a..b", "not a valid name"),
        ("http://host/v1#top", "has a fragment (#…)"),
        ("http://::1:8000", "an IPv6 address needs brackets; write http://[::1]:8000"),
        ("http://::1", "write http://[::1]"),
        ("http://2001:db8::5:8000/v1?a=b", "write http://[2001:db8::5]:8000"),
        ("http://host/v1/images/generations?a=b", "images/generations is another API than chat"),
        (f"http://me:{SECRET}@host", "user name or password"),
        (f"http://me:{SECRET}/1@host", "user name or password"),
        (f"http://me:1/{SECRET}#@host", "user name or password"),
        (f"me:{SECRET}@host:8000", "user name or password"),
        (f"http://host?key={SECRET}#a", "has a fragment"),
        ("unix:", "names no socket"),
        ("unix:////run/a.sock", "names no socket"),
        ("http+unix:///run/a.sock", "names no socket"),
        ("http+unix://%2Fa%20b", "names no socket"),
        ("http+unix://%2Fa/base?key=1", "names no socket"),
        ("unix:/" + 107 * "a", "at most 107 bytes"),
        ("missing.yaml", "target file missing.yaml: No such file"),
    ],
)
def test_a_wrong_url_is_one_line_with_the_mistake(text, problem):
    with pytest.raises(TargetFileError) as caught:
        load_target(text, {})
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


@given(st.text(max_size=40))
@example("http://\u2028")
@example("http://a%00b:1/%zz")
@example("//a")
@example("unix:a?b#c")
@example("http+unix://%2F%ff/%20")
@example("http://h/v4/v1")
@example("http://h/models/chat/completions?a=b")
@example("http://h/v4/models/models")
@example("http://h/v1/v1/chat/completions")
@example("http://h/a?b=é[%5B")
def test_any_text_is_an_address_or_one_line(text):
    message = ""
    try:
        address = parse_url(text)
        assert parse_url(address.url) == address
        assert 1 <= address.port <= 65535
    except TargetFileError as error:
        message = str(error)
    assert len(message.splitlines()) <= 1


FILE = """\
url: https://gw.example/v1
api: completions
model: llama
api_key_env: GW_KEY
headers: {x-tenant: blue}
extra_body: {top_k: 5}
connections: per_session
labels: {gpu: H100, gpus: 2, engine: vllm, version: "0.11", flags: --enforce-eager}
"""


def test_a_target_file_holds_everything_that_a_run_needs(tmp_path):
    path = tmp_path / "prod.yaml"
    path.write_text(FILE)
    endpoint = load_target(str(path), {"GW_KEY": SECRET})
    assert endpoint.url == "https://gw.example"
    assert endpoint.request_headers() == (
        ("x-tenant", "blue"),
        ("authorization", f"Bearer {SECRET}"),
    )
    adapter = endpoint.adapter(ignore_eos=False)
    assert (adapter.kind, adapter.model, adapter.ignore_eos) == ("completions", "llama", False)
    assert adapter.extra_body == {"top_k": 5}
    assert endpoint.to_manifest().to_json() == {
        "kind": "url",
        "url": "https://gw.example",
        "api": "completions",
        "model": "llama",
        "api_key_env": "GW_KEY",
        "headers": ["x-tenant"],
        "extra_body": {"top_k": 5},
        "connections": "per_session",
        "labels": {
            "gpu": "H100",
            "gpus": 2,
            "engine": "vllm",
            "version": "0.11",
            "flags": "--enforce-eager",
        },
    }


def test_traces_begin_only_where_the_target_asks_for_them():
    assert read_target("url: http://h\n", "t.yaml", {}).trace_context is False
    traced = read_target("url: http://h\ntrace_context: true\n", "t.yaml", {})
    assert traced.to_manifest().to_json()["trace_context"] is True


def test_session_headers_are_one_or_several_names():
    one = read_target("url: http://h\nsession_header: X-Session-Id\n", "t.yaml", {})
    assert one.session_header == ("x-session-id",)
    several = read_target("url: http://h\nsession_header: [x-a, x-b]\n", "t.yaml", {})
    assert several.to_manifest().to_json()["session_header"] == ["x-a", "x-b"]
    for names in ("x-request-id", "[x-a, X-A]", "host", "'x a'", "x.a"):
        with pytest.raises(TargetFileError, match=r"t\.yaml:2: session_header"):
            read_target(f"url: http://h\nsession_header: {names}\n", "t.yaml", {})


def test_no_secret_is_in_anything_an_endpoint_shows(caplog):
    text = f"url: http://h\nheaders: {{api-key: {SECRET}}}\n"
    endpoint = read_target(text, "t.yaml", {"OPENAI_API_KEY": SECRET})
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("test").info("target %s %r", endpoint, endpoint)
    shown = [
        repr(endpoint),
        str(endpoint),
        caplog.text,
        repr(endpoint.model_dump()),
        endpoint.model_dump_json(),
        json.dumps(endpoint.to_manifest().to_json()),
        repr(endpoint.to_manifest()),
        repr(endpoint.adapter()),
        repr(endpoint.__dict__),
    ]
    assert not [text for text in shown if SECRET in text]
    assert endpoint.has_key


def test_a_shard_receives_the_key_with_the_endpoint():
    endpoint = load_target("http://h", {"OPENAI_API_KEY": SECRET})
    again = pickle.loads(pickle.dumps(endpoint))
    assert again.request_headers() == (("authorization", f"Bearer {SECRET}"),)
    assert again == endpoint


def test_the_default_key_is_used_only_if_it_is_set():
    assert load_target("http://h", {}).request_headers() == ()
    assert load_target("http://h", {"OPENAI_API_KEY": " \n"}).request_headers() == ()
    keyed = load_target("http://h", {"OPENAI_API_KEY": f"{SECRET}\n"})
    assert keyed.api_key_env == "OPENAI_API_KEY"
    assert keyed.request_headers() == (("authorization", f"Bearer {SECRET}"),)


def test_an_authorization_header_of_the_file_wins_over_the_key():
    text = "url: http://h\nheaders: {Authorization: Basic abc}\n"
    endpoint = read_target(text, "t.yaml", {"OPENAI_API_KEY": SECRET})
    assert endpoint.request_headers() == (("Authorization", "Basic abc"),)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("url: http://h\nmodle: x", "t.yaml:2: modle: unknown key 'modle'; did you mean 'model'?"),
        (
            "url: http://h\nlabels:\n  gpuz: 1",
            "t.yaml:3: labels.gpuz: unknown key 'gpuz'; did you mean",
        ),
        (
            "url: http://h\nlabels: {version: 0.11}",
            "t.yaml:2: labels.version: must be text; put it in quotes",
        ),
        ("url: http://h\nlabels: {gpus: 0}", "t.yaml:2: labels.gpus: must be greater"),
        ("url: http://h\napi: chta", "t.yaml:2: api: unknown API 'chta'; did you mean 'chat'?"),
        ("url: http://h\nconnections: no", "t.yaml:2: connections: must be 'reuse'"),
        ("url: ftp://h", "t.yaml:1: url: target URL 'ftp://h': scheme 'ftp'"),
        ("model: x", "t.yaml:1: url: this key is required"),
        ("url: http://h\nurl: http://i", "t.yaml:2: url: duplicate key, first on line 1"),
        ("url: http://h\nca_cert: no.pem", "t.yaml:2: ca_cert: no such file: no.pem"),
        ("url: http://h\napi_key_env: NOPE", "t.yaml:2: api_key_env: environment variable NOPE"),
        ("url: http://h\nheaders: {a b: c}", "t.yaml:2: headers: 'a b' is not a header name"),
        ('url: http://h\nheaders: {a: "b\\nc"}', "t.yaml:2: headers: header a has characters"),
        ("- a", "t.yaml:1: expected a mapping of keys"),
        ("", "t.yaml: is empty"),
        ("a: [", "t.yaml:1: while parsing"),
        ("\x00", "t.yaml:1: special characters"),
        ("&a [*a]", "t.yaml:1: anchors and aliases"),
        ("url: http://h\n1: x", "t.yaml:2: 1: unknown key '1'"),
    ],
)
def test_a_mistake_in_a_target_file_is_one_line_with_file_line_and_key(text, line):
    with pytest.raises(TargetFileError) as caught:
        read_target(text, "t.yaml", {})
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_all_mistakes_of_a_file_are_reported_at_once():
    with pytest.raises(TargetFileError) as caught:
        read_target("url: 3\nmodle: x\nconnections: 4\n", "t.yaml", {})
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == ["1", "2", "3"]


def test_a_key_in_the_file_is_rejected_without_being_repeated():
    with pytest.raises(TargetFileError) as caught:
        read_target(f"url: http://h\napi_key: {SECRET}", "t.yaml", {})
    assert "export the key and name its variable in api_key_env" in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "text", [f"- {SECRET}", SECRET, f"url: http://h\nheaders: {{a: [{SECRET}]}}"]
)
def test_a_value_in_the_wrong_place_is_not_repeated(text):
    with pytest.raises(TargetFileError) as caught:
        read_target(text, "t.yaml", {})
    assert SECRET not in str(caught.value)


def test_a_key_that_no_header_can_carry_is_rejected_without_being_repeated():
    with pytest.raises(TargetFileError) as caught:
        load_target("http://h", {"OPENAI_API_KEY": f"{SECRET}\r\nx-evil: 1"})
    assert "OPENAI_API_KEY" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_certificate_is_found_relative_to_the_file(tmp_path):
    (tmp_path / "ca.pem").write_text("-")
    (tmp_path / "t.yaml").write_text("url: https://h\nca_cert: ca.pem\n")
    assert load_target(str(tmp_path / "t.yaml"), {}).ca_cert == tmp_path / "ca.pem"


def test_a_target_file_that_is_not_text_is_one_line(tmp_path):
    (tmp_path / "t.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(TargetFileError, match=r"t\.yaml: is not UTF-8 text"):
        load_target(str(tmp_path / "t.yaml"), {})


def test_the_route_goes_through_the_proxy_of_the_environment_without_showing_its_password():
    environ = {"https_proxy": f"http://me:{SECRET}@proxy:3128", "no_proxy": "localhost"}
    endpoint = load_target("https://gw.example", environ)
    proxy = endpoint.route.proxy
    assert proxy is not None
    assert endpoint.to_manifest()["proxy"] == "http://proxy:3128"
    assert endpoint.route.is_tunnelled
    shown = [repr(endpoint), repr(endpoint.route), str(endpoint.route), repr(proxy)]
    token = proxy.authorization.removeprefix("Basic ")
    assert not [text for text in shown if SECRET in text or token in text]
    assert endpoint.redact(f"got {token}") == "got [redacted]"
    assert load_target("https://localhost", environ).route.proxy is None
    assert "proxy" not in load_target("unix:/a.sock", environ).to_manifest()


def test_a_proxy_that_forwards_gets_its_credentials_with_every_request():
    forwarded = load_target("http://h", {"http_proxy": "http://me:pw@proxy:3128"})
    assert forwarded.request_headers() == (("proxy-authorization", "Basic bWU6cHc="),)
    tunnelled = load_target("https://h", {"https_proxy": "http://me:pw@proxy:3128"})
    assert tunnelled.request_headers() == ()


def test_an_endpoint_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Endpoint(url="http://h").url = "http://i"


@pytest.mark.parametrize(
    "field",
    [
        "n: 4", "n: '2'", "best_of: 3", "num_return_sequences: 2", "use_beam_search: true",
        "sampling_params: {n: 8}", "generationConfig: {candidateCount: 2}",
    ],
)  # fmt: skip
def test_several_answers_per_request_are_refused_by_name(tmp_path, field):
    path = tmp_path / "t.yaml"
    path.write_text(f"url: http://localhost:8000\nextra_body: {{{field}}}\n")
    with pytest.raises(TargetFileError, match="several answers per request") as refusal:
        load_target(str(path), {})
    assert field.rpartition("{")[2].partition(":")[0] in str(refusal.value)
    with pytest.raises(TargetFileError, match="several answers per request"):
        load_target("http://localhost:8000", {}, [f"extra_body={{{field}}}"])


@pytest.mark.parametrize("field", ["n: 1", "n: null", "best_of: 1", "top_n: 5", "seed: {n: 3}"])
def test_a_single_answer_is_accepted(tmp_path, field):
    path = tmp_path / "t.yaml"
    path.write_text(f"url: http://localhost:8000\nextra_body: {{{field}}}\n")
    assert load_target(str(path), {}).extra_body
