"""The mock server's replies without tokens: vectors of embeddings, and scores of a reranking.

Sources: the OpenAI API reference, "Embeddings"; vLLM's documentation, "Pooling models: rerank API";
the OpenAPI document of Text Embeddings Inference. Independent of the codecs on purpose, like
`mock_wire`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from loadgen.manifest.json_section import JsonObject
from targets.mock_script import WRONG_USAGE
from targets.mock_wire import ReplyText

_DIMENSIONS = 16


@dataclass(frozen=True)
class ResultsText(ReplyText):
    """A reply that comes whole, at the time of a first token, with a result for each text. `is_tei`
    is the form of Text Embeddings Inference."""

    n_texts: int = 1
    is_tei: bool = False

    @property
    def n_events(self) -> int:
        return 1

    def _fraction(self, text: int, place: int) -> float:
        """A number above 0 and below 1 that depends on the request, the text and the place."""
        return (1 + (self.number * 7919 + text * 104729 + place * 1299709) % 9973) / 9975

    def _with_usage(self, body: JsonObject) -> bytes:
        if self.script.usage != "off":
            tokens = int(self.prompt_tokens * WRONG_USAGE.get(self.script.usage, 1))
            body["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens}
        return json.dumps(body).encode()


class EmbeddingsText(ResultsText):
    """The reply of `POST /v1/embeddings`."""

    def whole(self) -> bytes:
        data = [
            {
                "object": "embedding",
                "index": k,
                "embedding": [2 * self._fraction(k, place) - 1 for place in range(_DIMENSIONS)],
            }
            for k in range(self.n_texts)
        ]
        return self._with_usage({"object": "list", "data": data, "model": self.model})


class RerankText(ResultsText):
    """The reply of `POST /v1/rerank`, best document first."""

    def whole(self) -> bytes:
        ranked = sorted(range(self.n_texts), key=lambda k: self._fraction(k, 0), reverse=True)
        if self.is_tei:
            return json.dumps(
                [{"index": k, "score": self._fraction(k, 0)} for k in ranked]
            ).encode()
        results = [{"index": k, "relevance_score": self._fraction(k, 0)} for k in ranked]
        name = f"rerank-{self.number:08x}"
        return self._with_usage({"id": name, "model": self.model, "results": results})


RESULTS: Mapping[str, type[ResultsText]] = {"embeddings": EmbeddingsText, "rerank": RerankText}
"""API → the form of its replies."""
