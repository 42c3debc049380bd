"""checksums.sha256 of a directory: a line per file, as `sha256sum` writes and checks it.

Writers add the files that they write (`cover`); readers check the files that they read (`check`).
The file is replaced by renaming, so that it is never half written. Nothing is added to a directory
without it, because a digest taken later proves nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from loadgen.errors import RunInvalid
from loadgen.system.whole_file import opened_regular, read_result, replacing

NAME = "checksums.sha256"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n\r\\]+)\n")
_ABSENT = "0" * 64
"""The digest of a file that is announced and need not be there yet."""
_REMEDY = "restore it from a copy, or measure again"
_REWRITTEN = ("summary.json", "report.html")
_UNLISTABLE = re.compile(r"[\n\r\\]")  # sha256sum writes these in another way
_TEMPORARY = (".partial", ".part")


def begin(directory: Path, names: Iterable[str]) -> None:
    """Starts the checksums of a new run with these files."""
    _write(directory, {name: (_digest(directory / name),) for name in names})


def cover(directory: Path, *paths: Path) -> None:
    """Adds files, or renews their digests where they are listed. Files outside of `directory` are
    left out, and a directory without checksums stays without."""
    listed = read(directory)
    root = directory.resolve()
    inside = [path.resolve() for path in paths if path.resolve().is_relative_to(root)]
    if listed is None or not inside:
        return
    names = [path.relative_to(root).as_posix() for path in inside]
    _write(directory, {**listed, **{name: (_digest(directory / name),) for name in names}})


def cover_rest(directory: Path) -> None:
    """Adds every file that is not listed yet; a directory without checksums stays without."""
    listed = read(directory)
    if listed is None:
        return
    rest = [name for name in files_in(directory) if name not in listed]
    _write(directory, {**listed, **{name: (_digest(directory / name),) for name in rest}})


def expect(directory: Path, name: str, content: bytes) -> None:
    """Announces the content of a file before it is replaced: until `cover`, the old and the new
    content are both accepted, and none where there was none, so that a process that is killed in
    between leaves no damage."""
    listed = read(directory)
    if listed is not None:
        before = () if (directory / name).exists() else (_ABSENT,)
        digests = (*listed.get(name, before), hashlib.sha256(content).hexdigest())
        _write(directory, {**listed, name: digests})


def replace(directory: Path, name: str, content: bytes) -> None:
    """Replaces a file of a directory as a whole, and renews its digest. A directory without
    checksums stays without."""
    expect(directory, name, content)
    with replacing(directory / name) as partial:
        partial.write_bytes(content)
    cover(directory, directory / name)


def read(directory: Path) -> dict[str, tuple[str, ...]] | None:
    """File name → its digests, without files that were announced and never written; None without
    checksums. Raises RunInvalid for a damaged file."""
    path = directory / NAME
    try:
        text = read_result(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunInvalid(f"{path}: cannot be read: {error}; {_REMEDY}") from None
    listed: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(re.findall(r"[^\n]*\n|[^\n]+", text), start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise RunInvalid(f"{path}: damaged in line {number}; {_REMEDY}")
        listed[match[2]] = (*listed.get(match[2], ()), match[1])
    return {
        name: digests
        for name, digests in listed.items()
        if _ABSENT not in digests or (directory / name).exists()
    }


def missing(directory: Path) -> RunInvalid:
    """The error for a directory whose checksums are missing."""
    return RunInvalid(
        f"{directory / NAME}: is missing: without it, nothing shows that the files there are "
        f"unchanged; {_REMEDY}"
    )


def check(directory: Path, listed: Mapping[str, tuple[str, ...]], names: Iterable[str]) -> None:
    """Raises RunInvalid that names the first file that is damaged, missing or not listed."""
    for name in names:
        if (problem := problem_of(directory, listed, name)) is not None:
            raise RunInvalid(problem)


def check_own(directory: Path, *names: str) -> None:
    """`check` of files of a directory that must have checksums."""
    if (listed := read(directory)) is None:
        raise missing(directory)
    check(directory, listed, names)


def check_read(directory: Path, *names: str) -> None:
    """`check` of those of these files that are there, in a directory with checksums; a directory
    without, such as an engine's own `--log-dir`, has nothing to compare with."""
    listed = read(directory)
    if listed is not None:
        check(directory, listed, [name for name in names if (directory / name).exists()])


def problem_of(directory: Path, listed: Mapping[str, tuple[str, ...]], name: str) -> str | None:
    """What is wrong with a file, in a sentence that begins with its path; None if it is intact."""
    path = directory / name
    remedy = "slobench report writes it again" if name in _REWRITTEN else _REMEDY
    if name not in listed:
        return f"{path}: has no line in {NAME}: it was added later, or {NAME} is damaged"
    try:
        digest = _digest(path)
    except FileNotFoundError:
        return f"{path}: is missing, and {NAME} lists it; {remedy}"
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror or error}; {remedy}"
    if digest not in listed[name]:
        return f"{path}: damaged: it does not match its line in {NAME}; {remedy}"
    return None


def problems(directory: Path) -> list[str]:
    """What is wrong with the listed files, a sentence each; empty if all are intact. Files that are
    not listed are not of slobench, and no problem."""
    try:
        listed = read(directory) or {}
    except RunInvalid as error:
        return [str(error)]
    found = (problem_of(directory, listed, name) for name in sorted(listed))
    return [problem for problem in found if problem is not None]


def files_in(directory: Path) -> list[str]:
    """Relative names of the files that checksums cover: all but hidden and temporary files, links,
    and those of nested directories with checksums of their own."""
    names: list[str] = []
    for folder, folders, files in os.walk(directory):
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and not (here / name / NAME).exists()
        )
        names += [
            path.relative_to(directory).as_posix()
            for path in (here / name for name in sorted(files))
            if not path.name.startswith(".")
            and path.suffix not in _TEMPORARY
            and path.name != NAME
            and path.is_file()
            and not path.is_symlink()
            and not _UNLISTABLE.search(path.name)
        ]
    return names


def _digest(path: Path) -> str:
    with opened_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(directory: Path, listed: Mapping[str, tuple[str, ...]]) -> None:
    lines = [f"{digest}  {name}\n" for name in sorted(listed) for digest in listed[name]]
    with replacing(directory / NAME) as partial:
        partial.write_text("".join(lines), encoding="utf-8")
