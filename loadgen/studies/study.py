"""Plumbing that all studies share: directory, lock, resume, result file, and the end of a verb.

    <out>/study.json         the study and its definition; `--resume` continues the same definition
    <out>/<name>.json        the result, typed, replaced as a whole
    <out>/checksums.sha256   of these and of the files that `Place` writes; readers compare
    <out>/…                  the files of the study's own

A new study needs a `Study`, a verb, and a line in `loadgen.cli.lazy_verbs`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import msgspec
import typer

from loadgen.archive import checksums
from loadgen.archive.directory import make_directory, point_latest, reserved
from loadgen.archive.directory_lock import NAME as LOCK
from loadgen.archive.directory_lock import held
from loadgen.archive.names import MARKER as MARKER
from loadgen.archive.verify import State, Verified
from loadgen.cli.terminal import print_json, stdout
from loadgen.errors import RunInvalid, SlobenchError, UsageError
from loadgen.manifest.json_section import JsonSection, encoded, read_section
from loadgen.run.manifest import recorded_command, version
from loadgen.studies.cells.cell import CELL_FILE, differing
from loadgen.system.whole_file import SUFFIX, read_result

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from reports.ending import Ending

R = TypeVar("R", bound=JsonSection)
_LOGS = "servers"
NO_DEFINITION: Mapping[str, Any] = {}


class Marker(JsonSection, frozen=True, kw_only=True):
    """The content of study.json. `definition` holds the settings that a resumed study must share;
    `command` has no secrets."""

    schema: int = 1
    study: str
    label: str
    began_utc: str
    slobench: str
    command: list[str]
    definition: dict[str, Any]


@dataclass(frozen=True)
class Study(Generic[R]):
    """A kind of study. `name` is that of the verb, of the result file and of the default directory;
    `noun` names the study in messages; `result` is the type of the result file. `before` are the
    names of further files, in any folder, that are written before the first run. `resumes`: its
    verb has --resume."""

    name: str
    noun: str
    result: type[R]
    before: tuple[str, ...] = ()
    resumes: bool = True

    @property
    def file(self) -> str:
        """The name of the result file."""
        return f"{self.name}.json"

    def read(self, directory: Path) -> R:
        """The result in a directory. Raises UsageError for none, RunInvalid that names the file if
        it was changed or cannot be read."""
        path, listed = directory / self.file, checksums.read(directory)
        if not path.exists() and self.file not in (listed or ()):
            raise UsageError(f"{directory}: holds no result of a {self.noun} ({self.file})")
        checksums.check_own(directory, self.file)
        try:
            return read_section(json.loads(read_result(path)), self.result, str(path))
        except (OSError, ValueError) as error:
            raise RunInvalid(f"{path}: cannot be read: {error}") from None

    @contextlib.contextmanager
    def opened(
        self,
        label: str,
        out: Path | None,
        *,
        resume: bool = False,
        definition: Mapping[str, Any] = NO_DEFINITION,
        command: Sequence[str] = (),
    ) -> Iterator[Place[R]]:
        """The locked directory of a study: `out`, or a new `runs/<name>-<label>-<time>`.

        `resume` continues the study in `out`, which must have the same `definition`. If an error
        ends a study before any work is stored, a directory made here is removed. Raises UsageError
        for a directory with other content, for a study that `resume` does not name, and for one in
        use; RunInvalid for a study whose study.json was changed.
        """
        if resume and out is None:
            raise UsageError("--resume: name the directory of the study with --out")
        is_new = out is None or not out.exists()
        directory = reserved(self.default(label)) if out is None else out
        if out is not None and out.exists() and not out.is_dir():
            raise UsageError(f"--out {out}: is not a directory")
        if resume and is_new:
            raise UsageError(f"--resume: {out} does not exist; leave out --resume")
        make_directory(directory)
        try:
            with held(directory, f"--out {directory}", f"the {self.noun} {label}".rstrip()):
                marker = self._entered(directory, label, resume, definition, command)
                yield Place(self, directory, marker, resume)
                if not (directory.parent / MARKER).is_file():  # not a part of another study
                    point_latest(directory)
        except BaseException:
            if is_new and not self._has_work(directory):
                _remove(directory, (MARKER, checksums.NAME, *self.before))
            raise

    def default(self, label: str) -> Path:
        """The directory of a study without `--out` that begins now."""
        words = [self.name, *([label] if label else []), f"{datetime.now():%Y%m%d-%H%M%S}"]
        return Path("runs") / "-".join(words)

    def _entered(
        self,
        directory: Path,
        label: str,
        resume: bool,
        definition: Mapping[str, Any],
        command: Sequence[str],
    ) -> Marker:
        """The marker of a new study, written now, or that of the study to resume."""
        path, has_work = directory / MARKER, self._has_work(directory)
        if not path.is_file():
            if has_work:
                raise UsageError(f"--out {directory}: exists already and holds no {self.noun}")
            if resume:
                raise UsageError(f"--resume: {directory} holds no {self.noun}; leave out --resume")
            return self._begun(path, label, definition, command)
        if resume and has_work:
            checksums.check_own(directory, MARKER)
        marker = _read_marker(path)
        if marker.study != self.name:
            raise UsageError(
                f"--out {directory}: holds the results of slobench {marker.study}; choose another"
            )
        if not has_work:  # its target never answered, or it was interrupted before
            return self._begun(path, label, definition, command)
        if not resume:
            remedy = "add --resume to continue it, or choose another --out"
            raise UsageError(
                f"--out {directory}: holds a {self.noun} that began {marker.began_utc}; "
                f"{remedy if self.resumes else 'choose another --out'}"
            )
        if lines := differing(_plain(definition), marker.definition):
            raise UsageError(
                f"--resume {directory}: the {self.noun} there has other settings "
                f"({'; '.join(lines)}); repeat those, or choose another --out"
            )
        return marker

    def _begun(
        self, path: Path, label: str, definition: Mapping[str, Any], command: Sequence[str]
    ) -> Marker:
        marker = Marker(
            study=self.name,
            label=label,
            began_utc=datetime.now(UTC).isoformat(),
            slobench=version(),
            command=list(recorded_command(command)),
            definition=_plain(definition),
        )
        if checksums.read(path.parent) is None:
            checksums.begin(path.parent, ())
        _write_section(path.parent, MARKER, marker)
        return marker

    def _has_work(self, directory: Path) -> bool:
        """Whether a directory holds more than the files that are written before the first run."""
        before = {LOCK, MARKER, checksums.NAME}
        before |= {name + SUFFIX for name in (self.file, MARKER, checksums.NAME)}
        return any(
            path.is_file() and path.name not in self.before
            for entry in directory.iterdir()
            if entry.name not in before and entry.name != _LOGS
            for path in (entry, *entry.rglob("*"))
        )


@dataclass(frozen=True)
class Place(Generic[R]):
    """The open directory of a study. `is_resumed`: it holds earlier work of the same study. `out`:
    the directory of the command line, where it is another because the study is part of another."""

    study: Study[R]
    directory: Path
    marker: Marker
    is_resumed: bool
    out: Path | None = None

    def write(self, result: R) -> None:
        """Replaces the result file as a whole."""
        _write_section(self.directory, self.study.file, result)

    def write_text(self, name: str, text: str) -> None:
        """Replaces another file of the study as a whole."""
        checksums.replace(self.directory, name, text.encode())

    def cover(self, *paths: Path) -> None:
        """Adds files that the study wrote in another way to its checksums."""
        checksums.cover(self.directory, *paths)

    def stored(self) -> R | None:
        """The result of the study to resume; None without one. Raises RunInvalid for a file that
        was changed or removed."""
        listed = checksums.read(self.directory) or {}
        is_stored = (self.directory / self.study.file).exists() or self.study.file in listed
        return self.study.read(self.directory) if self.is_resumed and is_stored else None

    @property
    def continuing(self) -> str:
        """The flags that continue the study."""
        return f"--out {self.out or self.directory} --resume"

    def print_interrupted(
        self, console: Console, done: str, command: str = "the same command with"
    ) -> None:
        """Prints what an interrupt kept, and how to continue. `command` comes before `--out`."""
        console.print(
            f"interrupted: {done}; {command} {self.continuing} continues",
            markup=False,
            soft_wrap=True,
        )


def check_store(directory: Path) -> Verified | None:
    """The files of a study besides its runs, compared with their checksums; None for another
    directory."""
    if not (directory / MARKER).is_file():
        return None
    try:
        listed = checksums.read(directory)
        if listed is None:
            raise checksums.missing(directory)
        study = _read_marker(directory / MARKER).study
    except SlobenchError as error:
        return Verified(str(directory), "study", "damaged", 0, (str(error),))
    result = f"{study}.json"
    there = [result] * (directory / result).exists()
    there += [f"{path.parent.name}/{CELL_FILE}" for path in directory.glob(f"*/{CELL_FILE}")]
    names = sorted({MARKER, *there, *listed})
    found = (checksums.problem_of(directory, listed, name) for name in names)
    problems = tuple(problem for problem in found if problem is not None)
    state: State = "verified" if result in there else "unfinished"
    if problems:
        state = "damaged"
    return Verified(str(directory), study, state, len(names), problems)


def end(
    content: Mapping[str, Any],
    shown: Callable[[], RenderableType],
    *,
    as_json: bool,
    exit_code: int,
    files: Mapping[str, Path],
    ending: Callable[[], Ending] | None = None,
    is_full: bool = False,
) -> NoReturn:
    """Ends a verb: the result on standard output, as JSON or as text (`print_result`); then a line
    for each of `files` (word → path) on standard error."""
    if as_json:
        print_json(content)
    else:
        print_result(shown, ending, is_full=is_full)
    for word, path in files.items():
        typer.echo(f"{word}: {path}", err=True)
    raise typer.Exit(exit_code)


def print_result(
    shown: Callable[[], RenderableType],
    ending: Callable[[], Ending] | None = None,
    *,
    is_full: bool = False,
) -> None:
    """Prints the `ending` of a result, with `is_full` or without an ending also `shown()`, whose
    lines are not wrapped if it is a string."""
    out = stdout()
    if ending is not None:
        from reports.ending import rendered

        out.print(rendered(ending(), out.width), soft_wrap=True)
        if not is_full:
            return
        out.print()
    if isinstance(text := shown(), str):
        typer.echo(text)
    else:
        out.print(text)


def _read_marker(path: Path) -> Marker:
    try:
        return read_section(json.loads(read_result(path)), Marker, str(path))
    except (OSError, ValueError, RunInvalid) as error:
        raise UsageError(f"{path}: cannot be read ({error}); choose another --out") from None


def _write_section(directory: Path, name: str, section: JsonSection) -> None:
    content = msgspec.json.format(encoded(section), indent=1)
    checksums.replace(directory, name, content + b"\n")


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value as a JSON file gives it back."""
    plain: dict[str, Any] = msgspec.json.decode(encoded(dict(value)))
    return plain


def _remove(directory: Path, names: Sequence[str]) -> None:
    """Removes the files of these names, and every folder that is then empty."""
    for path in [*sorted(directory.rglob("*"), reverse=True), directory]:
        with contextlib.suppress(OSError):
            if path.is_dir():
                path.rmdir()
            elif path.name in names:
                path.unlink()
