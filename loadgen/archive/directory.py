"""Creates the directory of a run, and removes it again if the run does not begin."""

from __future__ import annotations

import contextlib
import resource
import shutil
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from loadgen.archive import store
from loadgen.archive.directory_lock import held, is_empty
from loadgen.archive.names import is_result
from loadgen.archive.part_decoder import n_recorded
from loadgen.errors import RunInvalid, SlobenchError, TargetError, UsageError, notes_behind
from loadgen.records import Run, Status


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
        elif not any("slobench report" in note for note in notes_behind(error)) and (
            rows := _rows_kept(chosen)
        ):
            error.add_note(f"{rows} are kept: slobench report {chosen}")
        raise
    if replaced is not None:
        shutil.rmtree(replaced)
    point_latest(chosen)


def _rows_kept(directory: Path) -> str:
    """The recorded rows that `slobench report` reads in a directory, in words; empty if none."""
    try:
        if store.has_parts(directory):
            n = n_recorded(directory / "parts")
        elif (directory / "requests.parquet").is_file():
            n = _n_recorded(store.read_run(directory))
        else:
            n = 0
    except SlobenchError:  # a damaged file, which `slobench report` names
        return "the recorded rows"
    return f"{n} recorded rows" if n else ""


def _n_recorded(run: Run) -> int:
    return int((run.request_rows["status"] != Status.lost).sum())


@contextlib.contextmanager
def keep_elsewhere(directory: Path, run: Run, cache_dir: Path | None) -> Iterator[None]:
    """If the block cannot write the run into its directory, as on a full disk, writes it into a new
    directory in `cache_dir` or in the system's directory for temporary files. A note of the OSError
    names that directory, or counts the rows that are lost."""
    try:
        yield
    except OSError as error:
        n, places = _n_recorded(run), (cache_dir, Path(tempfile.gettempdir()))
        for place in places:
            if place is not None and (kept := _written_below(place, run)) is not None:
                error.add_note(f"all {n} recorded rows are kept: slobench report {kept}")
                raise
        with contextlib.suppress(SlobenchError):
            n -= n_recorded(directory / "parts")
        if n:
            tried = ", ".join(str(place) for place in (directory, *places) if place is not None)
            error.add_note(f"{n} recorded rows are lost: they cannot be written to {tried}")
        raise


def _written_below(place: Path, run: Run) -> Path | None:
    """A new directory in `place` with the run, or with parts of its rows where the size of files is
    limited (ulimit -f); None if it cannot be written there."""
    from loadgen.measure.attainment import derived

    kept = None
    try:
        place.mkdir(parents=True, exist_ok=True)
        kept = Path(tempfile.mkdtemp(prefix=f"slobench-{run.manifest.run}-", dir=place))
        store.write_schedule(kept, run)
        most_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if most_bytes == resource.RLIM_INFINITY:
            store.write_run(kept, run, derived(run))
        else:
            store.write_small_parts(kept / "parts", run, most_bytes)
    except OSError:
        if kept is not None:
            shutil.rmtree(kept, ignore_errors=True)
        return None
    return kept


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


def point_latest(directory: Path) -> None:
    """Points the link `latest`, next to a run or a study, at it, unless another file has that name
    or the file system has no links."""
    link = directory.parent / "latest"
    is_ours = link.is_symlink() and (not link.exists() or is_result(link))
    if is_ours or not (link.exists() or link.is_symlink()):
        with contextlib.suppress(OSError):
            link.unlink(missing_ok=True)
            link.symlink_to(directory.name, target_is_directory=True)
