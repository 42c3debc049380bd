"""The truth server's program: compiled from the C in `targets/truth` by the machine's own compiler,
once for each source and compiler.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loadgen.errors import MissingDependency

SOURCES = Path(__file__).with_name("truth")
COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra")
_LIBRARIES = ("-lm",)
_TIMEOUT_S = 120.0


def truth_program(cache_dir: Path, cc: str = "") -> Path:
    """The compiled program in `cache_dir`, made if this source and compiler have none there yet.

    `cc` is a compiler with flags, as in $CC; without it the first of COMPILERS that is installed is
    taken. Raises MissingDependency where there is none, or where it cannot compile.
    """
    if sys.platform != "linux":
        raise MissingDependency(
            f"the truth server needs Linux (epoll), and this is {sys.platform}; "
            "the mock server (--target mock) runs everywhere"
        )
    compiler = find_compiler(cc)
    program = cache_dir / f"truthd-{_key(compiler)}"
    if not program.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        _compile(compiler, program)
    return program


def find_compiler(cc: str = "") -> list[str]:
    """The command of a C compiler. Raises MissingDependency saying what to install."""
    for command in [shlex.split(cc)] if cc.strip() else [[name] for name in COMPILERS]:
        found = shutil.which(command[0])
        if found is not None:
            return [found, *command[1:]]
    named = f"CC={cc} is not there" if cc.strip() else f"none of {', '.join(COMPILERS)} is there"
    raise MissingDependency(
        f"the truth server is compiled on the machine it runs on, and {named}; install gcc "
        "(Debian, Ubuntu: apt-get install gcc libc6-dev; Fedora: dnf install gcc; "
        "Alpine: apk add gcc musl-dev), or name a compiler in CC"
    )


def _key(compiler: Sequence[str]) -> str:
    """A name for this source under this compiler and these flags."""
    told = subprocess.run(
        [*compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False
    ).stdout
    digest = hashlib.sha256(repr((*compiler, *_FLAGS, *_LIBRARIES)).encode() + told)
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: Sequence[str], program: Path) -> None:
    """Beside its place first, so that no other process ever sees half of it."""
    descriptor, unfinished = tempfile.mkstemp(prefix=program.name, dir=program.parent)
    os.close(descriptor)
    files = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    command = [*compiler, *_FLAGS, "-o", unfinished, *files, *_LIBRARIES]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if result.returncode:
            said = next((line for line in result.stderr.splitlines() if "error" in line), "")
            raise MissingDependency(
                f"{compiler[0]} cannot compile the truth server: "
                f"{said.strip() or f'exit status {result.returncode}'}; are the C library's "
                "headers installed (Debian, Ubuntu: libc6-dev)?"
            )
        os.replace(unfinished, program)
    finally:
        Path(unfinished).unlink(missing_ok=True)
