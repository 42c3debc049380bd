"""The process boundary: turns each failure into one message and an exit code."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from loadgen.cli.standard_streams import output_error
from loadgen.errors import SlobenchError, UsageError, interrupt_behind, notes_behind

NO_VERDICT = 3
INTERRUPTED = 130
_NO_MEMORY_TO_LOAD = re.compile("failed to map segment|[Cc]annot allocate memory")  # dlopen(3)
_INTERNAL = 4
_KINDS = {0: "none", 2: "usage", NO_VERDICT: "no_verdict", _INTERNAL: "internal"}
_KINDS |= {INTERRUPTED: "interrupted"}
_REASONS = {2: "the command line is wrong", INTERRUPTED: "interrupted"}
"""Exit code → the type and the message of a test case without a run."""
_FAILING = ("strict", "surrogateescape")
"""Error handlers of a stream that raise for a character outside of its encoding."""


def guarded(
    body: Callable[[], object], environ: Mapping[str, str], words: Sequence[str] = ()
) -> int:
    """Runs a command line; each failure is printed as one message and returned as an exit code. The
    file of `--junit` among its `words` is written in every case."""
    path = _junit_path(words)
    before = _state(path)
    code, reason = _ended(body, environ)
    if path is not None and _state(path) == before:
        _write_junit(path, code, reason)
    return code


def _complain(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _junit_path(words: Sequence[str]) -> Path | None:
    """The file that the option --junit names."""
    for word, value in zip(words, [*words[1:], ""], strict=False):
        name, equals, own = word.partition("=")
        if name == "--junit" and (equals or value):
            return Path(own if equals else value)
    return None


def _state(path: Path | None) -> tuple[int, int] | None:
    """What changes when a file is written; None without a file."""
    try:
        found = None if path is None else path.stat()
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_mtime_ns)


def _write_junit(path: Path, code: int, reason: str) -> None:
    """Writes the file of a command line that ended before it had a result."""
    from reports.page import write_page
    from reports.run.junit import junit_without_run

    kind = _KINDS.get(code, "no_verdict")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_page(path, junit_without_run(kind, reason or _REASONS.get(code, "no run was made")))
    except (OSError, SlobenchError) as error:
        _complain(f"slobench: --junit: {error}")
    else:
        _complain(f"junit: {path}")


def _ended(body: Callable[[], object], environ: Mapping[str, str]) -> tuple[int, str]:
    """(exit code, reason) of a command line; the reason is "" where it is printed elsewhere."""
    for stream in (sys.stdout, sys.stderr):  # a terminal in ASCII gets `?` for `✓`, not an error
        if isinstance(stream, io.TextIOWrapper) and stream.errors in _FAILING:
            stream.reconfigure(errors="replace")
    try:
        _check_words(sys.argv[1:])
        body()
    except SlobenchError as error:
        reason = _without_secrets(str(error), environ)
        for line in reason.splitlines():
            _complain(f"slobench: {line}")
        _print_notes(error)
        return error.exit_code, reason
    except SystemExit as end:  # typer ends this way, after usage errors too
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == INTERRUPTED:
            _complain("slobench: interrupted")
        _print_notes(end)
        return code, ""
    except OSError as error:  # a full disk, a directory that went away
        where = f"{error.filename}: " if error.filename else ""
        reason = f"{where}{error.strerror or error}"
        _complain(f"slobench: {reason}")
        _print_notes(error)
        return NO_VERDICT, reason
    except Exception as error:  # the process boundary
        _print_notes(error)
        if _is_out_of_memory(error):
            remedy = "raise the limit (ulimit -v), or send less"
            _complain(f"slobench: out of memory: {remedy}")
            return NO_VERDICT, f"out of memory: {remedy}"
        if interrupt_behind(error):
            _complain("slobench: interrupted")
            return INTERRUPTED, ""
        path = _write_traceback(environ)
        first_line = _without_secrets(f"{type(error).__name__}: {error}", environ).splitlines()[0]
        _complain(f"slobench: internal error: {first_line}")
        _complain(f"slobench: the details are in {path}; please report them")
        return _INTERNAL, f"internal error: {first_line}"
    return 0, ""


def _check_words(words: Sequence[str]) -> None:
    """Raises UsageError for a word that is not UTF-8, such as the name of an old file: no JSON file
    could hold it."""
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise UsageError(f"{word}: is not UTF-8 text; rename the file, or write it as UTF-8")


def _is_out_of_memory(error: Exception) -> bool:
    """Whether `ulimit -v` or a container's limit was reached: by Python, while a module was loaded,
    or at the start of a thread."""
    if isinstance(error, ImportError):
        return _NO_MEMORY_TO_LOAD.search(str(error)) is not None
    return isinstance(error, MemoryError) or str(error) == "can't start new thread"


def _print_notes(error: BaseException) -> None:
    for note in notes_behind(error):
        _complain(f"slobench: {note}")


def leave(code: int) -> NoReturn:
    """Ends the process at once: freeing the objects of a run would take another 0.1 s on an idle
    machine, and all files are written."""
    sys.stderr.flush()
    if (error := output_error()) is not None:  # `> /dev/full`
        _complain(f"slobench: standard output: {error.strerror or error}")
        code = code or NO_VERDICT
    if threading.active_count() > 1:
        sys.exit(code)  # waits for the other threads
    os._exit(code)


def _crash_text(environ: Mapping[str, str]) -> str:
    """The version, the command line and the traceback, without the secrets of command line and
    environment."""
    import traceback

    from loadgen import __version__
    from loadgen.run.manifest import recorded_command

    command = list(recorded_command(sys.argv))
    text = _without_secrets(traceback.format_exc(), environ)
    return f"slobench {__version__}, {command}\n{text}"


def _without_secrets(text: str, environ: Mapping[str, str]) -> str:
    from loadgen.run.manifest import without_secrets

    return without_secrets(text, sys.argv, environ)


def _write_traceback(environ: Mapping[str, str]) -> Path:
    """Writes the traceback into the cache directory or, if that fails, the current directory."""
    from datetime import datetime

    from loadgen.system.cache_directory import cache_dir

    name = f"error-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.txt"
    for directory in (cache_dir(environ), Path()):
        if directory is None:
            continue
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / name
            path.write_text(_crash_text(environ))
        except OSError:
            continue
        return path
    return Path(os.devnull)
