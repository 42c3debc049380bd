"""Other programs run by the GPU suite: pytest on `tests/gpu`, and NVIDIA's memory checker."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rig.gpu_session import Session

ROOT = Path(__file__).parents[2]
KERNELS = "tests/gpu/test_kernels_on_gpu.py"
_NO_TESTS_COLLECTED = 5  # pytest's exit code; without a GPU every file is skipped
_PROCESSES = 8


def gpu_tests(session: Session) -> None:
    """Runs the kernels' tests in several processes if pytest-xdist is installed, as most of their
    time is compilation; then the engine's tests alone, as they depend on the free memory."""
    n_processes = min(_PROCESSES, os.cpu_count() or 1)
    has_xdist = importlib.util.find_spec("xdist") is not None
    parallel = ["-p", "xdist.plugin", "-n", str(n_processes)]
    spread = parallel if has_xdist and n_processes > 1 else []
    runs = {"kernels": [*spread, KERNELS], "engine": ["tests/gpu", f"--ignore={KERNELS}"]}
    last_lines: dict[str, list[str]] = {}
    codes = []
    for name, arguments in runs.items():
        if session.is_rehearsal:
            arguments = ["--collect-only", *arguments]
        code, output = run_pytest(arguments, session.logs / f"tests-{name}.txt")
        print(output[-1500:])
        codes.append(code)
        last_lines[name] = output.strip().splitlines()[-1:]
        session.results.add("tests", last_lines)
    accepted = (0, _NO_TESTS_COLLECTED) if session.is_rehearsal else (0,)
    if not set(codes) <= set(accepted):
        raise RuntimeError(f"the tests of tests/gpu ended with {codes[0]} and {codes[1]}")


def run_pytest(
    arguments: Sequence[str],
    log: Path,
    before: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Exit code and output of pytest; the output is also written to `log` as it comes. Only the
    named plug-ins are loaded: others on the machine may warn, and warnings are errors here."""
    command = [
        *(*before, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("-p", "pytest_timeout", *arguments),
    ]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | dict(settings or {})
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False
        )
    return done.returncode, log.read_text(encoding="utf-8", errors="replace")


TOOLS = {
    "memcheck": "bfloat16 and (silu or norm or (8x4x128 and (decode_att or chunk_att)))",
    "racecheck": "bfloat16 and 8x4x128 and decode_att",
    "initcheck": "bfloat16 and 8x4x128 and (decode_att or chunk_att)",
}
"""The checkers of `compute-sanitizer`, each with the kernel tests that it watches."""


def sanitizer(session: Session) -> None:
    """Looks for memory errors, races in shared memory and reads of unwritten memory in the kernels,
    all at the same time, as nothing is timed; the result is `not run` with the reason where the
    tool is missing or does not start."""
    tool = shutil.which("compute-sanitizer")
    with ThreadPoolExecutor() as pool:
        runs = {
            checker: pool.submit(_sanitized, session, tool, checker, chosen)
            for checker, chosen in TOOLS.items()
        }
        for checker, run in runs.items():

            def collect(checker: str = checker, run: Future[str] = run) -> None:
                results = session.results.figures.get("sanitizer", {})
                session.results.add("sanitizer", results | {checker: run.result()})
                print(f"{checker}: {run.result()}")

            session.attempt(f"sanitizer, {checker}", collect)


def _sanitized(session: Session, tool: str | None, checker: str, chosen: str) -> str:
    if tool is None or session.is_rehearsal:
        return "not run: compute-sanitizer is not installed"
    code, output = run_pytest(
        [KERNELS, "-k", chosen],
        session.logs / f"{checker}.txt",
        before=[tool, "--tool", checker],
        # With torch's cache, a write beyond a tensor is often inside the same allocation.
        settings={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    return sanitizer_result(code, output)


def sanitizer_result(code: int, output: str) -> str:
    """The result of a pytest run under the sanitizer. Raises RuntimeError if it found an error, or
    found none but not all tests passed."""
    if "SUMMARY:" not in output:
        return f"not run: {output[-300:]}"
    passed = re.search(r"(\d+) passed", output)
    # Of racecheck: `RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)`.
    is_clean = re.search(r"(ERROR SUMMARY: 0 errors|SUMMARY: 0 hazards displayed)", output)
    if is_clean is None or code != 0 or passed is None:
        raise RuntimeError(f"exit code {code}: {output[-1000:]}")
    return f"clean: {passed[1]} tests"
