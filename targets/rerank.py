"""The codec of reranking (`POST /v1/rerank` or `/rerank`): a score for each document, no token.

Source: the Rerank APIs of Jina and Cohere (v1, v2), as vLLM (`entrypoints/pooling/score`) and
llama.cpp (`server-task.cpp`, `format_response_rerank`) serve them; that of Text Embeddings
Inference (`router/src/http/types.rs`, `RerankRequest`), whose documents are `texts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import Field

from loadgen.manifest.json_section import JsonObject
from targets.base import Delta, Request
from targets.openai_embeddings import TextsCodec, checked, cut, usage_of
from targets.openai_errors import stated_error
from targets.openai_usage import UsageWire

_QUERY_SHARE = 4  # a document has so many times the words of the query


class _Score(msgspec.Struct):
    index: int | None = None
    relevance_score: float | None = None
    score: float | None = None  # Text Embeddings Inference

    @property
    def value(self) -> float | None:
        return self.score if self.relevance_score is None else self.relevance_score


class _Answer(msgspec.Struct):
    results: list[_Score] | None = None
    usage: UsageWire | None = None
    error: Any = None
    message: Any = None


class Rerank(TextsCodec):
    """Reranking of `texts_per_request` documents. The first words of a prompt are the query, a
    quarter of a document's; the rest are the documents. A server counts the query once for each
    document. `documents_field`: `texts` for Text Embeddings Inference."""

    kind = "rerank"
    path: ClassVar[str] = "/rerank"
    results: ClassVar[str] = "scores"
    texts: ClassVar[frozenset[str]] = frozenset(("results", "relevance_score", "score"))
    decoder: ClassVar = msgspec.json.Decoder(_Answer)
    texts_per_request: int = Field(default=10, ge=1)
    documents_field: Literal["documents", "texts"] = "documents"

    def text_fields(self, request: Request, words: Sequence[str]) -> JsonObject:
        n_query = max(1, len(words) // (_QUERY_SHARE * self.texts_per_request + 1))
        query, rest = words[:n_query], words[n_query:] or words
        documents = cut(rest, self.texts_per_request)
        return {"query": " ".join(query), self.documents_field: documents}

    def decode(self, event: bytes) -> Delta:
        """An answer of Text Embeddings Inference is the bare list of scores."""
        if event.lstrip()[:1] == b"[":
            event = b'{"results":%b}' % event
        found = super().decode(event)
        return checked(found, self.texts_per_request, self.results, may_be_fewer=True)

    @staticmethod
    def to_delta(event: _Answer) -> Delta:
        if event.error:
            return Delta(error=stated_error(event.error, event.message))
        if event.results is None:
            return Delta(is_unknown=True)
        scores = [score.value for score in event.results]
        failure = "a document without a score" if None in scores else None
        text = " ".join(map(str, scores))
        return Delta(text=text, usage=usage_of(event.usage), error=failure, results=len(scores))

    def looks_like_token(self, fragment: bytes) -> bool:
        """Whether the bytes hold the key of a score; a search, without parsing."""
        return b'score":' in fragment
