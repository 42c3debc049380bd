"""Stand-ins for parts of the GPU suite, run as `python -m tests.reference_engine.gpu_part_stand_in
NAME RESULT MERGED LOGS`. None of them needs a GPU or torch, except `real`, which runs the part
`decode_steps` of the suite on a device that fails. With `--small`, NAME is a part of the suite at a
64th of the size, on a stand-in for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rig.gpu_results import PartResult


def main(name: str, result: str, merged: str, logs: str) -> int:
    results = PartResult(Path(result))
    if name == "ceilings":
        results.add("ceilings", {"copy_bytes_per_s": 3e12, "matmul_flops": 8e14})
    elif name == "kernels":  # a CUDA error that also breaks the end of the process
        results.add_row("kernels", timing())
        sys.stderr.write("CUDA error: an illegal memory access was encountered\n")
        os.kill(os.getpid(), 6)
    elif name == "decode_steps":  # never ends, and has a process of its own
        results.add_row("decode_steps", {"shape": "8b", "rows": 32, "seconds": 0.01})
        child = subprocess.Popen(["sleep", "600"])
        Path(logs, "child.pid").write_text(str(child.pid))
        while True:
            time.sleep(0.05)
    elif name == "tests":
        before = json.loads(Path(merged).read_text())["parts"]["ceilings"]["figures"]["ceilings"]
        results.add("tests", {"copy": before["copy_bytes_per_s"]})
        results.add_goal("speed", 0.7, 0.6, "of roof", label="9 ms")
    elif name == "real":
        return broken_decode_steps(result, merged, logs)
    else:
        results.add("other", name)
    return 0


def timing() -> dict[str, object]:
    return {"kernel": "decode attention", "case": "batch 32", "seconds": 1e-4, "share": 0.8,
            "of": "copy", "each_s": [1e-4, 1e-4]}  # fmt: skip


def broken_decode_steps(result: str, merged: str, logs: str) -> int:
    """A device that accepts no more work after its 30th wait."""
    import torch
    from rig import gpu_part
    from rig.gpu_ceilings import Place

    from tests.reference_engine.cuda_stand_in import StandIn

    cuda, waits = StandIn(), []

    def synchronise() -> None:
        waits.append(1)
        if len(waits) > 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cuda.synchronize = synchronise  # type: ignore[method-assign]  # of the stand-in
    place = Place("cpu", torch.float32, 64, cuda=cuda)
    return gpu_part.main(["decode_steps", result, merged, logs], place)


def small(*arguments: str) -> int:
    import torch
    from rig import gpu_part
    from rig.gpu_ceilings import Place

    from tests.reference_engine.cuda_stand_in import StandIn

    sys.modules["transformers"] = None  # type: ignore[assignment]  # as if it were missing
    return gpu_part.main(arguments, Place("cpu", torch.float32, 64, cuda=StandIn()))


if __name__ == "__main__":
    if sys.argv[-1] == "--small":
        sys.exit(small(*sys.argv[1:-1]))
    sys.exit(main(*sys.argv[1:]))
