"""A plugin with a mode that fails in its 20th step: on a GPU by an index out of range in a kernel,
after which CUDA accepts no more work, and aborts a process that frees its memory; on a CPU by
torch's own check of the index, with the same abort."""

from __future__ import annotations

import os
from typing import ClassVar

import torch
from pydantic import PrivateAttr

from reference_engine.executors.torch_cuda import TorchCuda
from reference_engine.policies.base import POLICIES
from reference_engine.policies.chunked import Chunked


@POLICIES.register
class Breaking(Chunked):
    kind: ClassVar[str] = "breaking"
    _n_plans: int = PrivateAttr(default=0)

    def plan(self, view):
        self._n_plans += 1
        if self._n_plans == 20:
            if not torch.cuda.is_available():
                TorchCuda.__del__ = lambda executor: os.abort()  # type: ignore[attr-defined]
            where = "cuda" if torch.cuda.is_available() else "cpu"
            torch.zeros(1, device=where)[torch.tensor([5], device=where)].tolist()
        return super().plan(view)
