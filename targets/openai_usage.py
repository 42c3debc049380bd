"""The token counts that servers of the OpenAI API state, under every name in use.

| count | names | source |
|---|---|---|
| prompt | `prompt_tokens`; `input_tokens` | OpenAI API reference, Chat and Responses |
| output | `completion_tokens`; `output_tokens` | the same |
| cached | `prompt_tokens_details.cached_tokens`, `input_tokens_details.cached_tokens` | the same |
| | `prompt_cache_hit_tokens` | DeepSeek API reference, "Create Chat Completion" |
| | `cached_tokens` | Moonshot API reference |
| | `cache_read_input_tokens` | Anthropic Messages API, through gateways (LiteLLM) |
| | `num_cached_tokens` | Mistral API reference, `UsageInfo` |
| | `cached_content_token_count` | Gemini API, `UsageMetadata`, through gateways |
| reasoning | `completion_tokens_details.reasoning_tokens`, `output_tokens_details` | OpenAI |
| | `reasoning_tokens` | SGLang |
| | `thoughts_token_count` | Gemini API, `UsageMetadata`, through gateways |
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from targets.base import Usage

MOST_TOKENS = 2**31 - 1
"""Fits the request table, and any sum of counts."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class InputDetails(msgspec.Struct):
    cached_tokens: Count | None = None


class OutputDetails(msgspec.Struct):
    reasoning_tokens: Count | None = None


class UsageWire(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    total_tokens: Count | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    reasoning_tokens: Count | None = None
    thoughts_token_count: Count | None = None
    cached_tokens: Count | None = None
    prompt_cache_hit_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None
    num_cached_tokens: Count | None = None
    cached_content_token_count: Count | None = None
    prompt_tokens_details: InputDetails | None = None
    completion_tokens_details: OutputDetails | None = None
    input_tokens_details: InputDetails | None = None
    output_tokens_details: OutputDetails | None = None

    def read(self) -> Usage:
        """The counts; of several names for a count, the largest value: a gateway may add a 0."""
        of_input = (self.prompt_tokens_details, self.input_tokens_details)
        of_output = (self.completion_tokens_details, self.output_tokens_details)
        cached = _largest(
            self.cached_tokens,
            self.prompt_cache_hit_tokens,
            self.cache_read_input_tokens,
            self.num_cached_tokens,
            self.cached_content_token_count,
            *(details.cached_tokens for details in of_input if details),
        )
        reasoning = _largest(
            self.reasoning_tokens,
            self.thoughts_token_count,
            *(details.reasoning_tokens for details in of_output if details),
        )
        prompt, output = self.prompt_tokens, self.completion_tokens
        if prompt is None and self.input_tokens is not None:
            # Anthropic's `input_tokens` are those that were not in the cache.
            prompt = self.input_tokens + (self.cache_read_input_tokens or 0)
            prompt += self.cache_creation_input_tokens or 0
        if output is None:
            output = self.output_tokens
        return Usage(prompt, self._with_reasoning(prompt, output, reasoning), cached, reasoning)

    def _with_reasoning(
        self, prompt: int | None, output: int | None, reasoning: int | None
    ) -> int | None:
        """The output tokens, reasoning included. xAI and Gemini count reasoning apart: then the
        total exceeds prompt and output by it."""
        if prompt is None or output is None or not reasoning or self.total_tokens is None:
            return output
        is_apart = self.total_tokens == prompt + output + reasoning
        return output + reasoning if is_apart else output


def _largest(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)
