"""A part of the GPU suite, in a process of its own; started by `gpu_stages`.

    python -m rig.gpu_part NAME RESULT MERGED LOGS [--rehearse]

Writes RESULT after every row, reads the figures of earlier parts from MERGED, and writes its own
files to the folder LOGS. Exits 1 if the part recorded a failure or raised.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from rig.gpu_ceilings import Place
from rig.gpu_experiments import experiments
from rig.gpu_parts import (
    decode_steps,
    generate,
    generate_batch,
    kernels,
    long_answers,
    measure_ceilings,
    mixed_contexts,
    modes,
    over_http,
    throughput,
    whole_long_answers,
)
from rig.gpu_results import PartResult, combined
from rig.gpu_session import Session
from rig.gpu_sweep import sweep
from rig.gpu_tools import gpu_tests, sanitizer

Part = Callable[[Session], None]
PARTS: Mapping[str, Part] = {
    "ceilings": measure_ceilings,
    "kernels": kernels,
    "decode_steps": decode_steps,
    "tests": gpu_tests,
    "throughput": throughput,
    "long_answers": long_answers,
    "generate_batch": generate_batch,
    "generate": generate,
    "http": over_http,
    "modes": modes,
    "mixed_contexts": mixed_contexts,
    "sweep": sweep,
    "sanitizer": sanitizer,
    "long": whole_long_answers,
    "experiments": experiments,
}
_PR_SET_PDEATHSIG = 1


def main(
    arguments: Sequence[str] | None = None,
    place: Place | None = None,
    parts: Mapping[str, Part] = PARTS,
) -> int:
    """The exit code. `place` replaces this machine's GPU, `parts` the table of parts."""
    parser = argparse.ArgumentParser(description="Run a part of the GPU suite.")
    parser.add_argument("name", choices=list(parts))
    for path in ("result", "merged", "logs"):
        parser.add_argument(path, type=Path)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    _end_with_parent()
    if place is None and options.rehearse:
        place = Place("cpu", torch.float32, 64)
    place = place or Place("cuda", torch.bfloat16, cuda=torch.cuda)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    results = PartResult(options.result, versions)
    results.write()
    merged = json.loads(options.merged.read_text(encoding="utf-8"))
    session = Session(place, options.logs, results, combined(merged, "figures"))
    try:
        parts[options.name](session)
        place.synchronise()
    except Exception as error:  # the boundary of a part: recorded, and exit code 1
        traceback.print_exc()
        results.add_failure(options.name, f"{type(error).__name__}: {error}")
    return 1 if results.failures else 0


def _end_with_parent() -> None:
    """Ends this process with its parent, also after SIGKILL, and a server of its own with it: as an
    exception, so that `finally` blocks run. Linux only."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
