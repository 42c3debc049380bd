"""Conversion of parsed calls to requests of the engine."""

from __future__ import annotations

import random
from dataclasses import replace

from reference_engine.serving.wire.call import Call
from reference_engine.serving.wire.wire_errors import WireError
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import AdmissionError, Limits, check_admission
from reference_engine.state.sequence import Request, Sampling
from reference_engine.state.tokenizer import Tokenizer


class Intake:
    """Makes requests from calls of a single choice. Reads only constants, so the event loop may use
    it while the engine runs."""

    def __init__(
        self, tokenizer: Tokenizer, limits: Limits, kv: KvPool, has_logits: bool = True
    ) -> None:
        self._tokenizer, self._limits, self._kv = tokenizer, limits, kv
        self._has_logits = has_logits

    def request(self, call: Call, request_id: str, arrived_s: float) -> Request:
        """The request of a call. Raises WireError if it would not fit into an empty engine."""
        n_top = 0 if call.sampling is None else call.sampling.top_logprobs
        if n_top > 1 and not self._has_logits:
            field = "top_logprobs" if call.is_chat else "logprobs"
            raise WireError(
                f"{field}: {n_top} is above the limit of 1 on this device, which computes no "
                "logits; tokens other than the chosen token need the device cpu or cuda",
                param=field,
            )
        tokens = self._encode(call)
        request = Request(
            id=request_id,
            tokens=tokens,
            max_tokens=call.max_tokens or self._room_after(len(tokens)),
            arrived_s=arrived_s,
            min_tokens=call.min_tokens,
            stop_ids=frozenset() if call.ignore_eos else self._tokenizer.eos_ids,
            sampling=_sampling(call),
            tenant=call.tenant,
            priority=call.priority,
            ttft_slo_s=call.ttft_slo_s,
            tpot_slo_s=call.tpot_slo_s,
            deadline_s=None if call.deadline_s is None else arrived_s + call.deadline_s,
        )
        try:
            check_admission(request.n_prompt, request.max_tokens, self._limits, self._kv)
        except AdmissionError as error:
            param = "messages" if call.is_chat else "prompt"
            raise WireError(str(error), param=param, code=error.code) from error
        return request

    def _encode(self, call: Call) -> list[int]:
        if call.messages is not None:
            tokens = self._tokenizer.render(call.messages)
        else:
            (prompt,) = call.prompts
            tokens = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        vocab = self._limits.vocab_size
        # Also checked for text: the tokenizer may belong to another model, and the model would
        # fail on such an id.
        if min(tokens) < 0 or max(tokens) >= vocab:
            bad = next(token for token in tokens if not 0 <= token < vocab)
            raise WireError(f"prompt: token id {bad} is outside 0-{vocab - 1}", param="prompt")
        return tokens

    def _room_after(self, n_prompt: int) -> int:
        """Output tokens that fit after a prompt, in the context and in an empty KV pool."""
        in_kv = self._kv.n_blocks * self._kv.block_tokens + 1  # the last token needs no KV
        return max(1, min(self._limits.max_model_len, in_kv) - n_prompt)


def _sampling(call: Call) -> Sampling:
    sampling = call.sampling or Sampling()
    return sampling if call.has_seed else replace(sampling, seed=random.getrandbits(63))
