"""`transformers` on the same random weights: `generate` and `generate_batch`."""

from __future__ import annotations

import time
from typing import Any

import torch

from reference_engine.model.config import ModelConfig
from reference_engine.model.weights import load
from reference_engine.model.zoo import resolve
from rig.gpu_ceilings import Place
from rig.peer_config import llama_config


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

    @property
    def attention(self) -> str:
        """Which implementation it took."""
        return str(self._model.config._attn_implementation)

    def generate_step_s(self, n_rows: int, context: int, n_new: int) -> float:
        """Seconds per decode step of the static batch: the difference of a long and a short run,
        so that the prompt is not in it."""
        ids = torch.randint(0, self._vocabulary, (n_rows, context), device=self._place.device)

        def run(n: int) -> float:
            self._place.synchronise()
            began_s = time.perf_counter()
            with torch.inference_mode():
                self._model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False
                )
            self._place.synchronise()
            return time.perf_counter() - began_s

        run(2)
        return (run(n_new + 2) - run(2)) / n_new

    def generate_batch_step_s(self, n_rows: int, context: int, n_new: int) -> float:
        """The same of its continuous batching."""
        prompts = torch.randint(0, self._vocabulary, (n_rows, context)).tolist()
        config = self._lib.GenerationConfig

        def run(n: int) -> float:
            how = config(max_new_tokens=n, do_sample=False, eos_token_id=-1, pad_token_id=0)
            self._place.synchronise()
            began_s = time.perf_counter()
            with torch.inference_mode():
                out = self._model.generate_batch(
                    inputs=prompts, generation_config=how, progress_bar=False
                )
            self._place.synchronise()
            took_s = time.perf_counter() - began_s
            n_tokens = sum(len(one.generated_tokens) for one in out.values())
            if n_tokens != n * n_rows:
                why = {str(one.error) for one in out.values()}
                raise RuntimeError(f"generate_batch gave {n_tokens} tokens of {n * n_rows}: {why}")
            return took_s

        run(2)
        return (run(n_new + 2) - run(2)) / n_new


def _empty(transformers: Any, config: ModelConfig, place: Place) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(place.dtype)
    try:
        with torch.device(place.device):
            return transformers.LlamaForCausalLM(llama_config(transformers, config))
    finally:
        torch.set_default_dtype(before)
