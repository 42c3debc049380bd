"""The codec of the OpenAI Embeddings API (`POST /v1/embeddings`): a vector for each text, no token.

Source: the OpenAI API reference, "Embeddings"; the answers of vLLM (`entrypoints/pooling`),
llama.cpp (`server-task.cpp`, `to_json_oaicompat`) and Text Embeddings Inference
(`router/src/http/server.rs`, `openai_embed`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from pydantic import Field

from loadgen.manifest.json_section import JsonObject
from targets.base import Delta, Request, Usage
from targets.openai_errors import stated_error
from targets.openai_usage import UsageWire
from targets.openai_wire import OpenAICodec

_COMPARED_BYTES = 128
_OF_ZEROS = b'[]", .-+eE0A='  # of a vector of zeros, as numbers or in base64


class TextsCodec(OpenAICodec):
    """The parts of a codec whose answers hold a result for each text of a request, and no token.

    `texts_per_request` texts are cut from the prompt, at blanks and of equally many words; a prompt
    of fewer words repeats its last word. Answers come whole.
    """

    has_exact_lengths: ClassVar[bool] = False
    stream: bool = False
    ignore_eos: bool = False
    min_tokens: bool = False
    sends_temperature: bool = False
    include_usage: bool = False
    texts_per_request: int = Field(default=1, ge=1)

    @abstractmethod
    def text_fields(self, request: Request, words: Sequence[str]) -> JsonObject:
        """The body fields of a request whose prompt has these words."""

    def sequence_tokens(self, input_tokens: int, output_tokens: int) -> int:
        """Those of a text, which is a sequence of its own."""
        return -(-input_tokens // self.texts_per_request)

    def prompt_fields(self, request: Request) -> JsonObject:
        fields = self.text_fields(request, prompt_of(request).split(" "))
        return {**request.fields, **fields}

    def common_fields(self, request: Request) -> JsonObject:
        """None: the fields that chat and completions share are about tokens."""
        fields: JsonObject = {"priority": request.priority} if request.priority else {}
        return fields | ({"tenant": request.tenant} if request.tenant else {})


class _Vector(msgspec.Struct):
    embedding: msgspec.Raw = msgspec.Raw()  # numbers, or base64 with `encoding_format: base64`


class _Answer(msgspec.Struct):
    data: list[_Vector] | None = None
    usage: UsageWire | None = None
    error: Any = None
    message: Any = None


class OpenAIEmbeddings(TextsCodec):
    """Embeddings. A request has as many vectors as texts; another number of them, a vector of zeros
    and a vector with `null` (a NaN of the server) are errors."""

    kind = "embeddings"
    path: ClassVar[str] = "/embeddings"
    results: ClassVar[str] = "vectors"
    texts: ClassVar[frozenset[str]] = frozenset(("data", "embedding"))
    decoder: ClassVar = msgspec.json.Decoder(_Answer)

    def text_fields(self, request: Request, words: Sequence[str]) -> JsonObject:
        n_texts = self.texts_per_request
        text = prompt_of(request) if n_texts == 1 else cut(words, n_texts)
        return {"input": text, "encoding_format": "float"}

    def decode(self, event: bytes) -> Delta:
        return checked(super().decode(event), self.texts_per_request, self.results)

    @staticmethod
    def to_delta(event: _Answer) -> Delta:
        if event.error:
            return Delta(error=stated_error(event.error, event.message))
        if event.data is None:
            return Delta(is_unknown=True)
        vectors = [bytes(vector.embedding) for vector in event.data]
        failure = next(filter(None, map(_fault, vectors)), None)
        text = vectors[0][:_COMPARED_BYTES].decode("utf-8", "replace") if vectors else ""
        usage = usage_of(event.usage)
        return Delta(text=text, usage=usage, error=failure, results=len(vectors))

    def looks_like_token(self, fragment: bytes) -> bool:
        """Whether the bytes hold the key of a vector; a search, without parsing."""
        return b'"embedding":' in fragment


def prompt_of(request: Request) -> str:
    """The prompt; of a conversation its messages, joined by blank lines, for the API has no
    roles."""
    return "\n\n".join(text for _, text in request.messages) or request.prompt


def cut(words: Sequence[str], n_texts: int) -> list[str]:
    """`n_texts` texts of equally many words, ±1, in order."""
    filled = [*words, *[words[-1]] * (n_texts - len(words))]
    ends = [len(filled) * k // n_texts for k in range(n_texts + 1)]
    return [" ".join(filled[ends[k] : ends[k + 1]]) for k in range(n_texts)]


def usage_of(stated: UsageWire | None) -> Usage | None:
    """The tokens of the texts; some servers state the total only, which has no output here."""
    if stated is None:
        return None
    usage = stated.read()
    tokens = stated.total_tokens if usage.input_tokens is None else usage.input_tokens
    return Usage(input_tokens=tokens, cached_tokens=usage.cached_tokens)


def checked(delta: Delta, n_texts: int, noun: str, *, may_be_fewer: bool = False) -> Delta:
    """The answer, or an error where its number of results is not that of the texts."""
    n_results = delta.results
    if delta.is_unknown or delta.error is not None or n_results == n_texts:
        return delta
    plural = "s" if n_texts > 1 else ""
    if may_be_fewer and 0 < n_results < n_texts:
        return delta
    return msgspec.structs.replace(delta, error=f"{n_results} {noun} for {n_texts} text{plural}")


def _fault(vector: bytes) -> str | None:
    """The reason why a vector is none; None for a vector."""
    if not vector.strip(b'[]" '):
        return "a vector without numbers"
    if not vector.strip(_OF_ZEROS):
        return "a vector of zeros"
    return "a vector with null (NaN)" if vector[:1] == b"[" and b"null" in vector else None
