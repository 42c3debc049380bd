"""Steps of one exact size: decodes first, prompts split so that the sum is the budget."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from reference_engine.policies.base import Policy
from reference_engine.policies.step_budget import StepBudget, admit_in_order
from reference_engine.state.cost_model import NO_PADDING, Padding
from reference_engine.state.plan import Plan, View


class SplitFuse(Policy):
    """Every step computes exactly `token_budget` tokens while there is that much to compute: one
    for each decode, the rest from prompts, long or short, cut where the budget ends. `pad: budget`
    fills what is missing with work for nobody, as an engine with one captured step size does; its
    steps then all take the same time.

    `watermark` is the share of KV blocks an admission leaves free.

    Source: DeepSpeed-FastGen (arXiv 2401.08671) §3.2 Dynamic SplitFuse.
    """

    kind: ClassVar[str] = "split_fuse"
    is_in_order: ClassVar[bool] = True

    token_budget: int = Field(default=512, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    watermark: float = Field(default=0.01, ge=0, lt=1)
    pad: Literal["none", "budget"] = "none"

    def plan(self, view: View) -> Plan:
        room = StepBudget.beside_decodes(
            view,
            tokens=self.token_budget,
            max_num_seqs=self.max_num_seqs,
            watermark=self.watermark,
        )
        room.resume()
        causes, rest = admit_in_order(room, view.waiting)
        left = max(0, room.tokens) if self.pad == "budget" else 0
        padding = Padding(prefill_tokens=left) if left else NO_PADDING
        return Plan(tuple(room.items), decode_all=True, causes=causes, rest=rest, padding=padding)
