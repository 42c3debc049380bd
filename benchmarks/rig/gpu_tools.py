"""What other programs say of the engine on a GPU: pytest, and NVIDIA's memory checker."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rig.gpu_session import Session

ROOT = Path(__file__).parents[2]
KERNELS = "tests/gpu/test_kernels_on_gpu.py"
_NOTHING_COLLECTED = 5  # without a GPU every file is skipped
_PROCESSES = 8


def gpu_tests(session: Session) -> None:
    """The kernels in several processes where pytest-xdist is there, since compiling them is most of
    the time; then the engine alone, since it looks at how much memory is left."""
    many = min(_PROCESSES, os.cpu_count() or 1)
    has_xdist = importlib.util.find_spec("xdist") is not None
    spread = ["-p", "xdist.plugin", "-n", str(many)] if has_xdist and many > 1 else []
    runs = {"kernels": [*spread, KERNELS], "engine": ["tests/gpu", f"--ignore={KERNELS}"]}
    found: dict[str, list[str]] = {}
    codes = []
    for name, arguments in runs.items():
        if session.is_rehearsal:
            arguments = ["--collect-only", *arguments]
        code, said = ran_pytest(arguments, session.logs / f"tests-{name}.txt")
        print(said[-1500:])
        codes.append(code)
        session.results.keep("tests", found | {name: said.strip().splitlines()[-1:]})
        found = session.results.found["tests"]
    fine = (0, _NOTHING_COLLECTED) if session.is_rehearsal else (0,)
    if not set(codes) <= set(fine):
        raise RuntimeError(f"the tests of tests/gpu ended with {codes[0]} and {codes[1]}")


def ran_pytest(
    arguments: Sequence[str],
    log: Path,
    before: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Exit code and output of a pytest, which is in the log from the first line on. Of plug-ins
    only those that are asked for: what else a machine has may warn, which our tests do not let
    pass."""
    command = [
        *(*before, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("-p", "pytest_timeout", *arguments),
    ]
    known = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | dict(settings or {})
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=known, check=False
        )
    return done.returncode, log.read_text(encoding="utf-8", errors="replace")


def sanitizer(session: Session) -> None:
    """Memory errors of the kernels, where NVIDIA's tool is there and starts; else it is said."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or session.is_rehearsal:
        session.results.keep("sanitizer", "not run: compute-sanitizer is not installed")
    else:
        chosen = (
            "bfloat16 and (silu or norm or ((decode_attention or chunk_attention) and 8x4x128))"
        )
        code, said = ran_pytest(
            [KERNELS, "-k", chosen],
            session.logs / "sanitizer.txt",
            before=[tool, "--tool", "memcheck"],
            # Else what one tensor writes into the next is within one allocation of torch's.
            settings={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        session.results.keep("sanitizer", sanitized(code, said))
    print(session.results.found["sanitizer"])


def sanitized(code: int, said: str) -> str:
    """What the tool says of a run of pytest. Raises RuntimeError where it found an error, or none
    in tests that did not all run."""
    if "ERROR SUMMARY" not in said:
        return f"not run: {said[-300:]}"
    passed = re.search(r"(\d+) passed", said)
    if "ERROR SUMMARY: 0 errors" not in said or code != 0 or passed is None:
        raise RuntimeError(f"exit code {code}: {said[-1000:]}")
    return f"clean: {passed[1]} tests"
