"""The cost of steps with speculative decoding: tokens that a draft proposes, and the model verifies
together."""

from __future__ import annotations

from dataclasses import dataclass

from reference_engine.state.cost_model import NO_PADDING, Padding, StepCost, StepShape


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft of k tokens per request and step. `acceptance[i]` is the share of the drafts whose
    first i + 1 tokens are all accepted, so that it falls with i. The k tokens of all requests are
    drafted one after the other: `token_s` each, and a step of `cost` each, where the draft is a
    model. That model also computes the prompts."""

    acceptance: tuple[float, ...]
    token_s: float = 0.0
    cost: StepCost | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.acceptance)

    @property
    def n_accepted(self) -> float:
        """Tokens of an answer per verification: the accepted, and one that the model adds."""
        return 1 + sum(self.acceptance)

    def decode_s(self, shape: StepShape) -> float:
        """The seconds in which the tokens of a step are drafted."""
        seconds = self.n_tokens * self.token_s
        if self.cost is not None:
            seconds += self.n_tokens * self.cost.estimate(_decodes_of(shape, shape.n_decode))
        return seconds

    def prompt_s(self, shape: StepShape) -> float:
        """The seconds in which the draft computes the prompts of a step."""
        if self.cost is None or not shape.prefill_tokens:
            return 0.0
        prompts = StepShape(
            shape.n_seqs - shape.n_decode, shape.prefill_tokens, shape.prefill_attention
        )
        return self.cost.estimate(prompts)


@dataclass(frozen=True, slots=True)
class SpeculativeCost:
    """The cost of a step in which every decoding request gets a token (`CostModel`), of an engine
    that drafts k tokens and verifies them in one step.

    A verification takes the k + 1 tokens of each request through the model and yields a =
    `draft.n_accepted` of them on average: a step of the simulation is 1/a of a verification. With V
    the time of the verification alone, D that of its drafts, W that of the verification together
    with the prompts of the step, and P that of the draft's prompts,

    t = (V + D) / a + max(0, W − V) + P.

    The mean rate of tokens is that of the engine, and prompts delay them by their whole time; the
    a tokens of a verification come evenly, not at once. KV of a request is read once for all of its
    k + 1 tokens, and each of these counts as a sequence.

    Source: Leviathan, Kalman & Matias, Fast Inference from Transformers via Speculative Decoding,
    ICML 2023 (arXiv 2211.17192), section 3, with acceptance by position in place of a constant.
    """

    target: StepCost
    draft: Draft

    def estimate(self, shape: StepShape) -> float:
        draft = self.draft
        padding = shape.padding
        n_rows = shape.n_decode + padding.decode_rows
        if not n_rows:
            return self.target.estimate(shape) + draft.prompt_s(shape)
        n_more = draft.n_tokens
        verified = shape._replace(
            n_seqs=shape.n_seqs + n_more * shape.n_decode,
            n_decode=(1 + n_more) * shape.n_decode,
            padding=padding._replace(decode_rows=(1 + n_more) * padding.decode_rows),
        )
        whole_s = self.target.estimate(verified)
        alone_s = self.target.estimate(_decodes_of(verified, verified.n_decode))
        token_s = (alone_s + draft.decode_s(shape)) / draft.n_accepted
        return token_s + max(0.0, whole_s - alone_s) + draft.prompt_s(shape)


def _decodes_of(shape: StepShape, n_decode: int) -> StepShape:
    """The decodes of a step alone, with their padding."""
    padding = shape.padding
    if padding is not NO_PADDING:
        padding = Padding(0, padding.decode_rows, padding.decode_context_tokens)
    return StepShape(n_decode, 0, 0.0, n_decode, shape.context_tokens, padding)
