"""`transformers` on the same random weights: `generate` and `generate_batch`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from reference_engine.model.weights import load
from reference_engine.model.zoo import resolve
from reference_engine.state.model_config import ModelConfig
from rig.gpu_ceilings import Place
from rig.peer_config import llama_config

PAGE = 256  # tokens per block of its memory, unless it is told otherwise


class Peer:
    """A Llama of `transformers` with the weights of a shape. Raises ImportError without it."""

    def __init__(self, shape: str, place: Place) -> None:
        import transformers

        self.version = str(transformers.__version__)
        self._lib: Any = transformers
        self._place = place
        source = resolve(shape)
        self._model = _empty(transformers, source.config, place)
        weights = load(source, 0, place.device, place.dtype)
        self._model.load_state_dict(weights, strict=not source.config.tied)
        self._model.eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self._vocabulary = source.config.vocab_size
        self.resolved: dict[str, str] = {}
        self._note_what_it_chooses()

    def _note_what_it_chooses(self) -> None:
        """`resolved` says, after a `generate_batch`, which of its own fast paths it took."""
        begin = self._model.init_continuous_batching

        def noted(*arguments: Any, **options: Any) -> Any:
            manager = begin(*arguments, **options)
            config = manager.continuous_batching_config
            self.resolved = {
                "paged attention": self.attention,
                "cuda graphs": str(config.use_cuda_graph),
                "async batching": str(config.use_async_batching),
            }
            return manager

        self._model.init_continuous_batching = noted

    @property
    def attention(self) -> str:
        """Which implementation it took."""
        return str(self._model.config._attn_implementation)

    def generate_step_s(self, n_rows: int, context: int, n_new: int) -> float:
        """Seconds per decode step of the static batch, between its first token and its last."""
        ids = torch.randint(0, self._vocabulary, (n_rows, context), device=self._place.device)
        instants: list[float] = []

        def stamped(ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
            self._place.synchronise()
            instants.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n_new,
                do_sample=False,
                stopping_criteria=self._lib.StoppingCriteriaList([stamped]),
            )
        return (instants[-1] - instants[0]) / (len(instants) - 1)

    def generate_batch_step_s(self, n_rows: int, context: int, n_new: int) -> float:
        """The same of its continuous batching, by the instants of its tokens: starting it takes
        longer than the steps. Raises RuntimeError with what it says where tokens are missing."""
        prompts = torch.randint(0, self._vocabulary, (n_rows, context)).tolist()
        how = self._lib.GenerationConfig(
            max_new_tokens=n_new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        own = self.attention
        try:
            # Not in inference mode: its loop runs in a thread of its own, where that does not hold,
            # and then may not write to what was made in it.
            out = self._model.generate_batch(
                inputs=prompts,
                generation_config=how,
                continuous_batching_config=self._memory(n_rows, context + n_new),
                record_timestamps=True,
            )
        finally:
            self._model.set_attn_implementation(own)  # a failed one leaves the paged one
        n_tokens = sum(len(one.generated_tokens) for one in out.values())
        if n_tokens != n_new * n_rows:
            why = {str(one.error) for one in out.values()}
            raise RuntimeError(f"generate_batch gave {n_tokens} tokens of {n_new * n_rows}: {why}")
        return common_step_s([one.timestamps for one in out.values()])

    def _memory(self, n_rows: int, n_tokens: int) -> Any:
        """None, as much as it likes, on a GPU; of a CPU's memory it would fill most."""
        if self._place.is_gpu:
            return None
        n_blocks = 2 * n_rows * -(-n_tokens // PAGE)
        return self._lib.ContinuousBatchingConfig(num_blocks=n_blocks, max_batch_tokens=256)


def common_step_s(instants: Sequence[Sequence[float]]) -> float:
    """Seconds between two tokens of a row while all rows get some: from the last first token to
    the first last one. Raises RuntimeError where there is no such time."""
    begin, end = max(row[0] for row in instants), min(row[-1] for row in instants)
    n_steps = max(sum(begin < at <= end for at in row) for row in instants)
    if not n_steps:
        raise RuntimeError("the rows never decoded together")
    return (end - begin) / n_steps


def _empty(transformers: Any, config: ModelConfig, place: Place) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(place.dtype)
    try:
        with torch.device(place.device):
            return transformers.LlamaForCausalLM(llama_config(transformers, config))
    finally:
        torch.set_default_dtype(before)
