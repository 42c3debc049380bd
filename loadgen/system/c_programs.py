"""Programs in C that come as sources, compiled by the machine's own compiler once for each source
and compiler."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.errors import MissingDependency

COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class CProgram:
    """The C files of the folder `sources`, compiled with `flags` into a file that begins with
    `stem`. `what` names the program in messages."""

    sources: Path
    stem: str
    what: str
    flags: tuple[str, ...]
    libraries: tuple[str, ...] = ("-lm",)

    def compiled(self, directory: Path, cc: str = "") -> Path:
        """The compiled program in `directory`, compiled if there is none for this source and
        compiler.

        `cc` is a compiler with flags, as in $CC; the default is the first of COMPILERS that is
        installed. Raises MissingDependency if there is none, or if it cannot compile the program.
        """
        compiler = find_compiler(cc, self.what)
        program = directory / f"{self.stem}-{self._key(compiler)}"
        if not program.exists():
            directory.mkdir(parents=True, exist_ok=True)
            self._compile(compiler, program)
        return program

    def _key(self, compiler: Sequence[str]) -> str:
        """A name for the combination of source, compiler and flags."""
        version = subprocess.run(
            [*compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False
        ).stdout
        digest = hashlib.sha256(repr((*compiler, *self.flags, *self.libraries)).encode() + version)
        for path in sorted(self.sources.glob("*.[ch]")):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()[:16]

    def _compile(self, compiler: Sequence[str], program: Path) -> None:
        """Compile into a temporary file and rename it, so that no process runs an incomplete
        program."""
        descriptor, unfinished = tempfile.mkstemp(prefix=program.name, dir=program.parent)
        os.close(descriptor)
        files = [str(path) for path in sorted(self.sources.glob("*.c"))]
        command = [*compiler, *self.flags, "-o", unfinished, *files, *self.libraries]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
            if result.returncode:
                errors = [line.strip() for line in result.stderr.splitlines() if "error" in line]
                reason = errors[0] if errors else f"exit status {result.returncode}"
                raise MissingDependency(
                    f"{compiler[0]} cannot compile {self.what}: {reason}; are the C library's "
                    "headers installed (Debian, Ubuntu: libc6-dev)?"
                )
            os.replace(unfinished, program)
        finally:
            Path(unfinished).unlink(missing_ok=True)


def find_compiler(cc: str, what: str) -> list[str]:
    """The command of a C compiler. Raises MissingDependency with the package to install."""
    for command in [shlex.split(cc)] if cc.strip() else [[name] for name in COMPILERS]:
        path = shutil.which(command[0])
        if path is not None:
            return [path, *command[1:]]
    absent = f"CC={cc} is not installed" if cc.strip() else f"found none of {', '.join(COMPILERS)}"
    raise MissingDependency(
        f"{what} needs a C compiler on this machine ({absent}): install gcc "
        "(Debian, Ubuntu: apt-get install gcc libc6-dev; Fedora: dnf install gcc; "
        "Alpine: apk add gcc musl-dev), or name a compiler in CC"
    )
