"""`/tokenize` and `/detokenize`, with the bodies of vLLM."""

from __future__ import annotations

from aiohttp import web

from reference_engine.serving.identity import ServerIdentity
from reference_engine.serving.wire import fields
from reference_engine.serving.wire.call import chat_messages, token_ids
from reference_engine.serving.wire.wire_errors import WireError
from reference_engine.state.tokenizer import Tokenizer


class TokenRoutes:
    """Conversions between text and token ids, on the event loop."""

    def __init__(self, tokenizer: Tokenizer, identity: ServerIdentity, vocab_size: int) -> None:
        self._tokenizer, self._identity, self._vocab_size = tokenizer, identity, vocab_size

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
        ]

    async def tokenize(self, request: web.Request) -> web.Response:
        """The ids of `prompt`, or of `messages` up to the start of the answer."""
        data = fields.parse_object(await request.read())
        self._identity.check_model(fields.text(data, "model"))
        if "messages" in data:
            tokens = self._tokenizer.render(chat_messages(data))
        else:
            prompt = fields.text(data, "prompt")
            if prompt is None:
                raise WireError("prompt or messages is required", param="prompt")
            tokens = self._tokenizer.encode(fields.valid_unicode(prompt))
        texts = None
        if fields.flag(data, "return_token_strs"):
            texts = [self._tokenizer.decode([token]) for token in tokens]
        return web.json_response(
            {
                "count": len(tokens),
                "max_model_len": self._identity.max_model_len,
                "tokens": tokens,
                "token_strs": texts,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """The text of the ids of a prompt."""
        data = fields.parse_object(await request.read())
        self._identity.check_model(fields.text(data, "model"))
        tokens = token_ids(data.get("tokens"), "tokens", "a non-empty list of token ids")
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                message = f"tokens: token id {token} is outside 0-{self._vocab_size - 1}"
                raise WireError(message, param="tokens")
        return web.json_response({"prompt": self._tokenizer.decode(tokens)})
