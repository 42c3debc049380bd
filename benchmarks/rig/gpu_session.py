"""The argument of every part of the GPU suite: the device, the ceilings and the results."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference_engine.kernels.ops import Ops, ops
from reference_engine.kernels.tiles import Tuning, tuning_of
from rig.gpu_ceilings import Ceilings, Place
from rig.gpu_results import PartResult


@dataclass
class Session:
    """A part's surroundings. `logs` is the folder for its own files; `before` holds the figures of
    the parts that ran before."""

    place: Place
    logs: Path
    results: PartResult
    before: Mapping[str, Any] = field(default_factory=dict)

    @property
    def top(self) -> Ceilings:
        """The ceilings measured in this stage; NaN if that failed, so that times still count."""
        rates = self.before.get("ceilings", {})
        nan = float("nan")
        return Ceilings(rates.get("copy_bytes_per_s", nan), rates.get("matmul_flops", nan))

    @property
    def is_rehearsal(self) -> bool:
        """Whether there is no GPU."""
        return self.place.cuda is None

    @property
    def is_small(self) -> bool:
        return self.place.scale > 1

    @property
    def gpu_name(self) -> str:
        """`NVIDIA H100 80GB HBM3`; `CPU` in a rehearsal."""
        cuda = self.place.cuda
        return "CPU" if cuda is None else str(cuda.get_device_properties(0).name)

    def shape(self, name: str) -> str:
        return "nano" if self.is_small else name

    @property
    def tuning(self) -> Tuning:
        """The engine's choice for this GPU."""
        return tuning_of(self.gpu_name)

    def ops(self, tuning: Tuning | None = None) -> Ops:
        """The operations with a tuning, by default with the engine's choice."""
        return ops("triton" if self.place.is_gpu else "plain", tuning or self.tuning)

    def attempt(self, name: str, work: Callable[[], None]) -> bool:
        """Run the work of a row; if it raises, record the failure, so that the other rows count.
        Returns whether it succeeded. Raises the device's error if the device accepts no more work:
        after such an error every later call of this process fails."""
        try:
            work()
            self.place.synchronise()
        except Exception as error:  # the boundary of a row: recorded, printed, and exit code 1
            traceback.print_exc()
            self.results.add_failure(name, f"{type(error).__name__}: {error}")
            self.place.synchronise()
            return False
        finally:
            self.place.release_memory()
        return True
