"""Batches on the CPU with torch, in float32."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from reference_engine.executors.base import Caps, Executor, ExecutorKind, Site
from reference_engine.executors.torch_memory import allocating
from reference_engine.model.attention import flatten
from reference_engine.model.filler import padding_rows
from reference_engine.model.llama import Llama
from reference_engine.model.sampling import sample_with_logprobs
from reference_engine.model.weights import load
from reference_engine.state.batch import StepBatch, StepResult

_COPY_BYTES_PER_S = 5e9  # a core copying from memory to memory; decides swap or recompute


class TorchCpuExecutor(ExecutorKind):
    """`threads` of torch's pool; `seed` of the random weights (unused with a directory).

    Padding is computed like any row and its result discarded, so that a mode that pads is as slow
    as it would be on a GPU.
    """

    kind: ClassVar[str] = "torch_cpu"

    threads: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0)

    def build(self, site: Site) -> Executor:
        torch.set_num_threads(self.threads)
        config = site.model.config
        weights = load(site.model, self.seed)
        block_bytes = config.kv_bytes_per_token() * site.block_tokens
        with allocating("kv_blocks", site.n_blocks, block_bytes):
            # The engine's pool and the scratch block, which padding writes to.
            model = Llama(config, weights, site.n_blocks + 1, site.block_tokens, site.max_model_len)
        with allocating("swap_blocks", site.n_host_blocks, block_bytes):
            host = model.host_memory(site.n_host_blocks)
        caps = Caps(site.n_host_blocks, block_bytes / _COPY_BYTES_PER_S, has_logits=True)
        return _TorchCpu(model, host, site, caps)


class _TorchCpu:
    def __init__(self, model: Llama, host: torch.Tensor, site: Site, caps: Caps) -> None:
        self._model, self._host, self.caps = model, host, caps
        self._scratch, self._max_model_len = site.n_blocks, site.max_model_len

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> StepResult:
        model = self._model
        for copy in batch.copies:
            model.copy_block(self._host, copy)
        rows = list(batch.all_rows())
        if not rows:
            return StepResult()
        rows += padding_rows(batch.padding, self._scratch, model.block_tokens, self._max_model_len)
        step = flatten(rows, model.layout)
        sampling = [i for i in step.order if rows[i].samples]
        if not sampling:
            model.forward(step)
            return StepResult()
        requests = [rows[i].request for i in sampling]
        tokens, logprobs = sample_with_logprobs(model.forward(step), requests)
        # From the order of the flat step to the order of the batch.
        order = sorted(range(len(sampling)), key=sampling.__getitem__)
        return StepResult(
            [tokens[i] for i in order], None if logprobs is None else [logprobs[i] for i in order]
        )
