"""Creates the directory of a run, and removes it again if the run does not begin."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from loadgen.archive import store
from loadgen.archive.directory_lock import held, is_empty
from loadgen.errors import RunInvalid, SlobenchError, TargetError, UsageError


@contextlib.contextmanager
def run_directory(name: str, out_dir: Path | None, force: bool) -> Iterator[Path]:
    """A new directory: `out_dir`, or `runs/<name>-<time>`, locked for this process. If the run ends
    before its first request, without a manifest, the directory is removed, and the run that `force`
    would have replaced is restored."""
    if out_dir is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        chosen, replaced = reserved(Path("runs") / f"{name}-{stamp}"), None
    else:
        chosen, replaced = out_dir, _set_aside(out_dir, force)
        make_directory(chosen)
    with held(chosen, f"--out {chosen}", f"the run {name}"):
        yield from _filled(chosen, replaced)


def _filled(chosen: Path, replaced: Path | None) -> Iterator[Path]:
    try:
        yield chosen
    except BaseException as error:
        if not (chosen / "manifest.json").is_file():
            kept = _keep_log(chosen, error)
            shutil.rmtree(chosen, ignore_errors=True)
            if replaced is not None:
                replaced.rename(chosen)
            if kept is not None:
                raise type(error)(f"{error}\nits whole output is in {kept}") from None
        elif is_unfinished(chosen):
            error.add_note(f"the rows recorded so far are kept: slobench report {chosen}")
        elif (chosen / "requests.parquet").is_file():
            error.add_note(f"the recorded rows are kept: slobench report {chosen}")
        raise
    if replaced is not None:
        shutil.rmtree(replaced)
    _point_latest(chosen)


def is_unfinished(directory: Path) -> bool:
    """Whether `slobench report` can recover rows that were recorded but not merged into the tables;
    not without a manifest, nor from a damaged one."""
    try:
        return store.has_parts(directory)
    except SlobenchError:
        return False


def _keep_log(chosen: Path, error: BaseException) -> Path | None:
    """Moves the log of a launched server or of a load-generating process that failed out of a run
    directory that will be removed; None without such a log."""
    if not isinstance(error, (TargetError, RunInvalid)):
        return None
    names = "server.log" if isinstance(error, TargetError) else "shard-*.log"
    for log in sorted((chosen / "logs").glob(names)):
        if log.stat().st_size:
            return log.rename(free(chosen.with_name(f"{chosen.name}.{log.name}")))
    return None


def _set_aside(chosen: Path, force: bool) -> Path | None:
    """Renames an existing run, to be removed when the new run has begun; None if there is none."""
    if not chosen.exists():
        return None
    if not chosen.is_dir():
        raise UsageError(f"--out {chosen}: already exists, and is no directory")
    if is_empty(chosen):
        return None
    with held(chosen, f"--out {chosen}", "a run that replaces it"):
        if not force:
            hint = f"; it is unfinished: slobench report {chosen}" if is_unfinished(chosen) else ""
            raise UsageError(
                f"--out {chosen}: already exists; --force overwrites the run in it{hint}"
            )
        if not (chosen / "manifest.json").is_file():
            raise UsageError(f"--out {chosen}: not a run, and --force overwrites only runs")
        return chosen.rename(free(chosen.with_name(f".{chosen.name}.replaced")))


def make_directory(chosen: Path) -> None:
    """Makes a directory unless it exists. Raises UsageError."""
    try:
        chosen.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {chosen}: cannot be made: {error.strerror}") from None


def reserved(path: Path) -> Path:
    """A new, empty directory: `path`, or the first of `path-1`, `path-2`, … that no other process
    has made. Raises UsageError."""
    make_directory(path.parent)
    while True:
        chosen = free(path)
        try:
            chosen.mkdir()
        except FileExistsError:  # made by another process in this moment
            continue
        except OSError as error:
            raise UsageError(f"--out {chosen}: cannot be made: {error.strerror}") from None
        return chosen


def free(path: Path) -> Path:
    """`path`, or the first of `path-1`, `path-2`, … that does not exist."""
    candidates = (path.with_name(f"{path.name}-{n}") if n else path for n in range(1000))
    return next(candidate for candidate in candidates if not candidate.exists())


def _point_latest(directory: Path) -> None:
    """Points the link `latest`, next to the run, at it, unless another file has that name or the
    file system has no links."""
    link = directory.parent / "latest"
    is_ours = link.is_symlink() and (not link.exists() or (link / "manifest.json").is_file())
    if is_ours or not (link.exists() or link.is_symlink()):
        with contextlib.suppress(OSError):
            link.unlink(missing_ok=True)
            link.symlink_to(directory.name, target_is_directory=True)
