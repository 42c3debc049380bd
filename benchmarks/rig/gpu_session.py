"""One run of the GPU suite: where, for how long, and what it found."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from reference_engine.kernels.ops import Ops, ops
from rig.gpu_budget import Budget, Over
from rig.gpu_ceilings import Ceilings, Place
from rig.gpu_results import Results


@dataclass
class Session:
    """What every part of the suite is given. `logs` is where their own files go."""

    place: Place
    is_long: bool
    logs: Path
    results: Results
    budget: Budget
    top: Ceilings = field(default_factory=lambda: Ceilings(float("nan"), float("nan")))

    @property
    def is_rehearsal(self) -> bool:
        """Whether there is no GPU, so that nothing is judged or kept."""
        return self.place.cuda is None

    @property
    def is_small(self) -> bool:
        return self.place.scale > 1

    def shape(self, name: str) -> str:
        return "nano" if self.is_small else name

    def ops(self) -> Ops:
        return ops("triton" if self.place.is_gpu else "plain")

    def run(self, name: str, part: Callable[[Session], None], at_most_s: float) -> None:
        """A part that fails, or takes more than its time, is a part that failed, and the others are
        still worth having: machines are lent for a time."""
        results = self.results
        if self.budget.left_s <= 0:
            over_s = -self.budget.left_s
            results.failed(
                name, f"not begun: {self.budget.seconds:g} s were over {over_s:.0f} s ago"
            )
            return
        print(f"\n== {name}", flush=True)
        began_s = time.monotonic()
        results.write()
        try:
            with self.budget.watched(float("inf") if self.is_long else at_most_s):
                part(self)
        except Over as over:
            print(f"   {over}", flush=True)
            results.failures[name] = str(over)
        except Exception as error:  # the boundary of a part: kept, shown, and exits 1
            traceback.print_exc()
            results.failures[name] = f"{type(error).__name__}: {error}"
        results.seconds[name] = time.monotonic() - began_s
        results.write()
        self.place.give_back()
        print(f"   {results.seconds[name]:.1f} s", flush=True)
