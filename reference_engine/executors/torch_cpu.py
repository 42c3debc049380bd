"""Batches on the CPU with torch, in float32."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from reference_engine.executors.base import (
    Caps,
    Executor,
    ExecutorKind,
    Site,
    StepBatch,
    StepResult,
)
from reference_engine.model.attention import flatten
from reference_engine.model.llama import Llama
from reference_engine.model.sampling import sample_with_logprobs
from reference_engine.model.weights import load


class TorchCpuExecutor(ExecutorKind):
    """`threads` of torch's own pool; `seed` of the random weights (unused with a directory)."""

    kind: ClassVar[str] = "torch_cpu"

    threads: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0)

    def build(self, site: Site) -> Executor:
        torch.set_num_threads(self.threads)
        weights = load(site.model, self.seed)
        return _TorchCpu(
            Llama(site.model.config, weights, site.n_blocks, site.block_tokens, site.max_model_len)
        )


class _TorchCpu:
    def __init__(self, model: Llama) -> None:
        self._model = model
        self.caps = Caps()

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> StepResult:
        rows = list(batch.all_rows())
        if not rows:
            return StepResult()
        step = flatten(rows, self._model.block_tokens)
        sampling = [i for i in step.order if rows[i].samples]
        if not sampling:
            self._model.forward(step)
            return StepResult()
        requests = [rows[i].request for i in sampling]
        tokens, logprobs = sample_with_logprobs(self._model.forward(step), requests)
        # Back from the order of the batch to that of the rows.
        back = sorted(range(len(sampling)), key=sampling.__getitem__)
        return StepResult(
            [tokens[i] for i in back], None if logprobs is None else [logprobs[i] for i in back]
        )
