"""The codecs of embeddings and of reranking against the answers of several servers, written by hand
from their documentation: OpenAI ("Embeddings"), vLLM ("Pooling models"), llama.cpp (server README,
"/v1/embeddings", "/v1/rerank") and Text Embeddings Inference (its OpenAPI document)."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.archive.decode import answer_texts, decode
from loadgen.archive.exchange import Exchange
from loadgen.records import Status, TokenSource
from targets.base import Delta, Request, Usage
from targets.openai_embeddings import OpenAIEmbeddings, cut
from targets.rerank import Rerank

EMBEDDINGS = OpenAIEmbeddings(model="m")
RERANK = Rerank(model="m", texts_per_request=2)

VECTOR_ANSWERS = {
    "openai": b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.0023,-0.009'
    b',-0.0028]}],"model":"text-embedding-3-small","usage":{"prompt_tokens":8,"total_tokens":8}}',
    "vllm": b'{"id":"embd-1","object":"list","created":1760000000,"model":"m","data":[{"index":0,'
    b'"object":"embedding","embedding":[0.018,-0.02]}],"usage":{"prompt_tokens":8,"total_tokens":8,'
    b'"completion_tokens":0,"prompt_tokens_details":null}}',
    "llama.cpp": b'{"model":"m","object":"list","usage":{"prompt_tokens":8,"total_tokens":8},'
    b'"data":[{"embedding":[0.0,-0.5],"index":0,"object":"embedding"}]}',
    "tei": b'{"object":"list","data":[{"object":"embedding","embedding":[-0.01,1e-05],"index":0}],'
    b'"model":"BAAI/bge-small-en","usage":{"prompt_tokens":8,"total_tokens":8}}',
    "base64": b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":"AACAPwAAAMA='
    b'"}],"usage":{"prompt_tokens":8,"total_tokens":8}}',
}

SCORE_ANSWERS = {
    "vllm": (
        b'{"id":"rerank-1","model":"m","usage":{"total_tokens":56},"results":[{"index":1,"document":'
        b'{"text":"Paris."},"relevance_score":0.99},{"index":0,"document":{"text":"Oslo."},'
        b'"relevance_score":0.0004}]}',
        "0.99 0.0004",
        56,
    ),
    "llama.cpp": (
        b'{"model":"m","object":"list","usage":{"prompt_tokens":56,"total_tokens":56},"results":['
        b'{"index":0,"relevance_score":-8.5},{"index":1,"relevance_score":3.25}]}',
        "-8.5 3.25",
        56,
    ),
    "jina": (
        b'{"model":"jina-reranker-v2","object":"list","usage":{"total_tokens":56},"results":['
        b'{"index":1,"relevance_score":0.7},{"index":0,"relevance_score":0.5}]}',
        "0.7 0.5",
        56,
    ),
    "cohere": (
        b'{"results":[{"index":1,"relevance_score":0.9},{"index":0,"relevance_score":0.3}],"id":"1"'
        b',"meta":{"api_version":{"version":"2"},"billed_units":{"search_units":1}}}',
        "0.9 0.3",
        None,
    ),
    "tei": (b'[{"index":1,"score":0.98},{"index":0,"score":0.02}]', "0.98 0.02", None),
}


def exchange(body, codec_times=(1_000, 2_000)):
    half = len(body) // 2
    return Exchange(
        row=0,
        sent_ns=1,
        n_bytes=len(body),
        headers_ns=500,
        done_ns=3_000,
        http_status=200,
        content_type="application/json",
        length=len(body),
        times=list(codec_times),
        parts=[body[:half], body[half:]],
    )


@pytest.mark.parametrize("server", VECTOR_ANSWERS)
def test_a_vector_of_each_server_is_one_result_with_its_tokens(server):
    delta = EMBEDDINGS.decode(VECTOR_ANSWERS[server])
    assert (delta.results, delta.error, delta.is_token) == (1, None, False)
    assert delta.usage == Usage(input_tokens=8)


@pytest.mark.parametrize("server", SCORE_ANSWERS)
def test_scores_of_each_server_are_results_with_the_total_as_input(server):
    body, text, tokens = SCORE_ANSWERS[server]
    delta = RERANK.decode(body)
    assert (delta.results, delta.error, delta.text) == (2, None, text)
    assert (delta.usage and delta.usage.input_tokens) == tokens


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"data":[]}', "0 vectors for 1 text"),
        (b'{"data":[{"embedding":[1]},{"embedding":[1]}]}', "2 vectors for 1 text"),
        (b'{"data":[{"embedding":[]}]}', "a vector without numbers"),
        (b'{"data":[{"index":0}]}', "a vector without numbers"),
        (b'{"data":[{"embedding":""}]}', "a vector without numbers"),
        (b'{"data":[{"embedding":[0.0, -0.0, 0]}]}', "a vector of zeros"),
        (b'{"data":[{"embedding":"AAAAAAAAAAA="}]}', "a vector of zeros"),
        (b'{"data":[{"embedding":[0.5,null]}]}', "a vector with null (NaN)"),
        (b'{"error":{"message":"too long","type":"invalid_request_error"}}', "too long"),
        (b'{"object":"error","message":"no model","code":404}', "no model"),
    ],
)
def test_an_answer_without_a_true_vector_has_failed(body, error):
    assert EMBEDDINGS.decode(body).error == error
    decoded = decode(exchange(body), EMBEDDINGS)
    assert (decoded.status, decoded.error) == (Status.stream_error, f"error in the answer: {error}")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"results":[]}', "0 scores for 2 texts"),
        (b"[]", "0 scores for 2 texts"),
        (b'{"results":[{"index":0,"relevance_score":null}]}', "a document without a score"),
        (b'[{"score":1},{"score":1},{"score":1}]', "3 scores for 2 texts"),
        (b'{"error":"Model is overloaded","error_type":"Overloaded"}', "Model is overloaded"),
    ],
)
def test_an_answer_without_scores_has_failed(body, error):
    assert RERANK.decode(body).error == error


def test_a_reranking_may_return_the_best_documents_only():
    delta = RERANK.decode(b'{"results":[{"index":1,"relevance_score":0.9}]}')
    assert (delta.results, delta.error) == (1, None)


def test_other_json_is_no_answer():
    for codec in (EMBEDDINGS, RERANK):
        assert codec.decode(b'{"choices":[]}').is_unknown
        decoded = decode(exchange(b'{"choices":[]}'), codec)
        assert decoded.error.startswith("not a whole answer")


def test_an_answer_has_an_end_and_results_but_no_token():
    decoded = decode(exchange(VECTOR_ANSWERS["openai"]), EMBEDDINGS)
    assert (decoded.status, decoded.results, decoded.last_token_ns) == (Status.ok, 1, 2_000)
    assert (decoded.first_token_ns, decoded.first_answer_ns, decoded.chunk_ns) == (0, 0, [])
    assert (decoded.output_tokens, decoded.token_source) == (0, TokenSource.none)
    assert (decoded.input_tokens, decoded.answer_crc32 > 0) == (8, True)
    assert answer_texts(exchange(VECTOR_ANSWERS["openai"]), EMBEDDINGS)[0] == ""


def test_the_answer_of_another_model_is_noted():
    decoded = decode(exchange(VECTOR_ANSWERS["openai"]), EMBEDDINGS)
    assert decoded.error == "answered by model text-embedding-3-small"


def test_an_embedding_request_has_no_field_about_tokens():
    request = Request("one two three", 64, temperature=0.7, seed=3)
    assert json.loads(EMBEDDINGS.encode(request).body) == {
        "model": "m",
        "input": "one two three",
        "encoding_format": "float",
    }
    encoded = OpenAIEmbeddings(model="m", texts_per_request=2).encode(request)
    assert json.loads(encoded.body)["input"] == ["one", "two three"]
    assert (encoded.path, dict(encoded.headers)["accept"]) == ("/v1/embeddings", "application/json")


def test_a_conversation_is_one_text():
    talk = Request("", 1, messages=(("user", "Hi"), ("assistant", "Yo")))
    assert json.loads(EMBEDDINGS.encode(talk).body)["input"] == "Hi\n\nYo"


def test_a_reranking_begins_with_the_query_a_quarter_of_a_document():
    words = " ".join(str(k) for k in range(90))
    sent = json.loads(Rerank(texts_per_request=2).encode(Request(words, 1)).body)
    assert sent["query"] == " ".join(str(k) for k in range(10))
    assert [len(text.split()) for text in sent["documents"]] == [40, 40]
    tei = json.loads(
        Rerank(texts_per_request=2, documents_field="texts").encode(Request(words, 1)).body
    )
    assert tei["texts"] == sent["documents"]
    assert "documents" not in tei


def test_the_longest_sequence_is_that_of_a_text():
    assert EMBEDDINGS.sequence_tokens(512, 64) == 512
    assert OpenAIEmbeddings(texts_per_request=4).sequence_tokens(510, 64) == 128


@given(st.lists(st.text("ab", min_size=1), min_size=1, max_size=50), st.integers(1, 60))
def test_texts_hold_every_word_once_in_order_and_are_equally_long(words, n_texts):
    texts = cut(words, n_texts)
    lengths = [len(text.split(" ")) for text in texts]
    assert len(texts) == n_texts
    assert all(texts)
    assert max(lengths) - min(lengths) <= 1
    joined = " ".join(texts).split(" ")
    assert joined[: len(words)] == words
    assert set(joined[len(words) :]) <= {words[-1]}


def test_the_live_view_sees_results():
    assert all(map(EMBEDDINGS.looks_like_token, VECTOR_ANSWERS.values()))
    assert all(RERANK.looks_like_token(body) for body, *_ in SCORE_ANSWERS.values())
    assert not EMBEDDINGS.looks_like_token(b'{"error":{"message":"full"}}')
    assert not RERANK.looks_like_token(b'{"error":{"message":"full"}}')


@given(st.sampled_from([*VECTOR_ANSWERS.values(), SCORE_ANSWERS["tei"][0]]), st.data())
def test_a_damaged_answer_is_a_delta_or_a_value_error(body, data):
    at = data.draw(st.integers(0, len(body) - 1))
    damaged = body[:at] + data.draw(st.binary(max_size=3)) + body[at + 1 :]
    for codec in (EMBEDDINGS, RERANK):
        with suppress(ValueError):
            assert isinstance(codec.decode(damaged), Delta)
