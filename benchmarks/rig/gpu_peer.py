"""`transformers` with the same random weights, for comparison: `generate` and `generate_batch`."""

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

PAGE = 256  # its default tokens per block of KV


class Peer:
    """The Llama of `transformers` with the weights of a shape. Raises ImportError without
    `transformers`."""

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
        self._record_fast_paths()

    def _record_fast_paths(self) -> None:
        """Let each `generate_batch` set `resolved` to the fast paths that `transformers` chose."""
        start = self._model.init_continuous_batching

        def recording(*arguments: Any, **options: Any) -> Any:
            manager = start(*arguments, **options)
            config = manager.continuous_batching_config
            self.resolved = {
                "paged attention": self.attention,
                "cuda graphs": str(config.use_cuda_graph),
                "async batching": str(config.use_async_batching),
            }
            return manager

        self._model.init_continuous_batching = recording

    @property
    def attention(self) -> str:
        """The attention implementation in use."""
        return str(self._model.config._attn_implementation)

    def generate_step_s(self, n_rows: int, context: int, n_new: int) -> float:
        """Seconds per decode step of a static batch, between its first and its last token."""
        ids = torch.randint(0, self._vocabulary, (n_rows, context), device=self._place.device)
        token_times: list[float] = []

        def stamp(ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
            self._place.synchronise()
            token_times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n_new,
                do_sample=False,
                stopping_criteria=self._lib.StoppingCriteriaList([stamp]),
            )
        return (token_times[-1] - token_times[0]) / (len(token_times) - 1)

    def generate_batch_step_s(self, n_rows: int, context: int, n_new: int) -> float:
        """Seconds per decode step of continuous batching, from the times of its tokens: its start
        takes longer than the steps. Raises RuntimeError with its errors if tokens are missing."""
        prompts = torch.randint(0, self._vocabulary, (n_rows, context)).tolist()
        generation_config = self._lib.GenerationConfig(
            max_new_tokens=n_new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        attention = self.attention
        try:
            # Not in inference mode: its loop runs in another thread, to which the mode does not
            # extend, and which may not write to tensors made in it.
            out = self._model.generate_batch(
                inputs=prompts,
                generation_config=generation_config,
                continuous_batching_config=self._memory(n_rows, context + n_new),
                record_timestamps=True,
            )
        finally:
            self._model.set_attn_implementation(attention)  # a failed call leaves it paged
        n_tokens = sum(len(answer.generated_tokens) for answer in out.values())
        if n_tokens != n_new * n_rows:
            errors = {str(answer.error) for answer in out.values()}
            raise RuntimeError(
                f"generate_batch returned {n_tokens} of {n_new * n_rows} tokens: {errors}"
            )
        return common_step_s([answer.timestamps for answer in out.values()])

    def _memory(self, n_rows: int, n_tokens: int) -> Any:
        """Limits for continuous batching: as many blocks as the rows need. Its default is a share
        of the memory, all of which its attention reads in every step without FlashAttention, and
        which 32 rows of 8 k tokens do not fit into."""
        n_blocks = 2 * n_rows * -(-n_tokens // PAGE)
        if self._place.is_gpu:
            return self._lib.ContinuousBatchingConfig(num_blocks=n_blocks, max_batch_tokens=8192)
        return self._lib.ContinuousBatchingConfig(num_blocks=n_blocks, max_batch_tokens=256)


def common_step_s(token_times: Sequence[Sequence[float]]) -> float:
    """Seconds between two tokens of a row while all rows decode: from the latest first token to the
    earliest last token. Raises RuntimeError if there is no such interval."""
    begin, end = max(row[0] for row in token_times), min(row[-1] for row in token_times)
    n_steps = max(sum(begin < at <= end for at in row) for row in token_times)
    if not n_steps:
        raise RuntimeError("the rows never decoded together")
    return (end - begin) / n_steps


def _empty(transformers: Any, config: ModelConfig, place: Place) -> Any:
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(place.dtype)
    try:
        with torch.device(place.device):
            return transformers.LlamaForCausalLM(llama_config(transformers, config))
    finally:
        torch.set_default_dtype(default_dtype)
