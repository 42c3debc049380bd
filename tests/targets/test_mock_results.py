"""The mock's embeddings and rerankings, by their bytes, and the preflight of both APIs against
it."""

import asyncio
import json
import urllib.request
from urllib.error import HTTPError

import pytest

from loadgen.errors import TargetFileError
from targets.base import TARGETS, Request
from targets.embed import mock
from targets.endpoint import load_target, read_target
from targets.openai_embeddings import OpenAIEmbeddings
from targets.preflight import preflight
from targets.rerank import Rerank

TEXT = "the model of latency token and server time is stream " * 400


@pytest.fixture(scope="module", autouse=True)
def _registered():
    """Both codecs, also where the installed package is older than its entry points."""
    known = dict(TARGETS._local)
    TARGETS.register(OpenAIEmbeddings)
    TARGETS.register(Rerank)
    yield
    TARGETS._local.clear()
    TARGETS._local.update(known)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with mock({"ttft": "2ms", "itl": "1ms"}, tmp_path_factory.mktemp("results")) as served:
        yield served.endpoint.url


def post(url, path, body, script=""):
    """The status and the JSON of the response."""
    request = urllib.request.Request(
        f"{url}{path}", json.dumps(body).encode(), {"x-mock": script, "connection": "close"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.load(response)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_embeddings_are_a_vector_for_each_text_with_the_tokens_of_all(url):
    status, body = post(url, "/v1/embeddings", {"input": ["x" * 40, "y" * 8]})
    assert (status, body["object"], body["usage"]["prompt_tokens"]) == (200, "list", 12)
    assert [item["index"] for item in body["data"]] == [0, 1]
    first, second = (item["embedding"] for item in body["data"])
    assert len(first) == len(second) == 16
    assert first != second
    assert all(-1 < value < 1 for value in first + second)
    assert post(url, "/v1/embeddings", {"input": "x" * 40})[1]["usage"]["total_tokens"] == 10


def test_a_reranking_counts_the_query_with_each_document_and_is_sorted(url):
    body = {"query": "q" * 8, "documents": ["a" * 32, "b" * 12, "c" * 4]}
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        status, found = post(url, path, body)
        assert (status, found["usage"]["total_tokens"]) == (200, 18)
        scores = [result["relevance_score"] for result in found["results"]]
        assert scores == sorted(scores, reverse=True)
        assert sorted(result["index"] for result in found["results"]) == [0, 1, 2]


def test_documents_called_texts_are_answered_as_by_tei(url):
    status, found = post(url, "/rerank", {"query": "q", "texts": ["a", "b"]})
    assert status == 200
    assert [set(result) for result in found] == [{"index", "score"}] * 2


def preflight_of(url, path, script="", lines=""):
    headers = f"headers: {{x-mock: '{script}'}}\n" if script else ""
    endpoint = read_target(f"url: {url}{path}\n{headers}{lines}", "t.yaml", {})
    return asyncio.run(
        preflight(
            endpoint, endpoint.adapter(), max_input_tokens=100, max_output_tokens=1,
            timeout_s=5.0, text_of=lambda n_chars: TEXT[:n_chars],
        )
    )  # fmt: skip


def lines_of(result):
    return {check.check: (check.ok, check.detail) for check in result.checks}


@pytest.mark.parametrize(
    ("path", "lines", "answer"),
    [
        ("/v1/embeddings", "", "1 vector an answer, without tokens: latency is end to end"),
        ("", "api: embeddings\ntexts_per_request: 3\n", "3 vectors an answer, without tokens"),
        ("/v1/rerank", "", "10 scores an answer, without tokens"),
        (
            "/rerank",
            "model: mock-model\ntexts_per_request: 2\n",
            "2 scores an answer, without",
        ),
    ],
)
def test_a_server_that_can_be_measured_passes_every_check(url, path, lines, answer):
    result = preflight_of(url, path, lines=lines)
    checks = lines_of(result)
    assert result.fatal is None
    assert checks["results"][0] is True
    assert checks["results"][1].startswith(answer)
    assert checks["fields"] == (True, "all accepted")
    assert checks["prompt_fit"][0] is True
    assert checks["usage"][0] is True
    assert not {"streaming", "ignore_eos", "finish_reason"} & set(checks)
    assert result.adapter.stream is False


def test_a_rerank_url_without_a_version_finds_the_models_of_vllm(url):
    """vLLM serves `/rerank` and lists its models at `/v1/models` only, as the mock does."""
    result = preflight_of(url, "/rerank")
    assert (result.fatal, result.model) == (None, "mock-model")


def test_documents_become_texts_where_documents_are_refused(url):
    result = preflight_of(url, "/v1/rerank", "reject=documents")
    assert result.fatal is None
    assert lines_of(result)["fields"] == (True, "texts replaces documents")
    assert lines_of(result)["usage"] == (None, "not stated: input tokens are those of the plan")
    assert lines_of(result)["prompt_fit"][0] is None
    assert result.adapter.documents_field == "texts"


def test_a_text_that_exceeds_the_model_is_found_before_the_run(url):
    endpoint = read_target(
        f"url: {url}/v1/embeddings\nheaders: {{x-mock: 'max_model_len=30'}}\n", "t.yaml", {}
    )
    assert endpoint.adapter().sequence_tokens(100, 1) == 100
    status, body = post(url, "/v1/embeddings", {"input": "x" * 400}, "max_model_len=30")
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("fail=notsse", "not a whole answer"),
        ("fail=500", "answered 500: scripted failure 500"),
        ("fail=reset", "the connection was"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
def test_a_sick_server_is_not_measured(url, path, script, message):
    assert message in (preflight_of(url, path, script).fatal or "")


def test_a_pasted_url_picks_the_codec():
    for ending in ("/v1/embeddings", "/openai/deployments/d/embeddings?api-version=2024-10-21"):
        assert load_target(f"http://h{ending}", {}).api == "embeddings"
    for ending in ("/v1/rerank", "/rerank", "/v2/rerank"):
        endpoint = load_target(f"http://h{ending}", {})
        assert endpoint.api == "rerank"
        first = endpoint.adapter().encode(Request("a b", 1)).path
        assert endpoint.address.path(first) == ending


def test_texts_per_request_belong_to_apis_without_tokens():
    with pytest.raises(TargetFileError, match="this key is for embeddings and rerank"):
        read_target("url: http://h\ntexts_per_request: 4\n", "t.yaml", {})
    with pytest.raises(TargetFileError, match="texts_per_request"):
        read_target("url: http://h\napi: embeddings\ntexts_per_request: 0\n", "t.yaml", {})
    endpoint = read_target("url: http://h\napi: embeddings\ntexts_per_request: 4\n", "t.yaml", {})
    assert (endpoint.streams, endpoint.adapter().stream) == (False, False)
