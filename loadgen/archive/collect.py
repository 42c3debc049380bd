"""Rows of a distributed run that no master has confirmed: where workers keep them, and how they get
into the run's directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from loadgen.archive import store
from loadgen.errors import RunInvalid, UsageError
from loadgen.manifest.json_section import read_section
from loadgen.manifest.self_report import ClientReport, SelfReport
from loadgen.measure.attainment import derived, with_counted_window
from loadgen.measure.closed_loop import counting_start, with_start_left_out
from loadgen.measure.truncated import with_truncated
from loadgen.records import Status
from loadgen.system.whole_file import read_result

UNCONFIRMED = "unconfirmed"
"""The folder in the cache directory in which workers keep a folder per share."""
SHARE, DONE = "share.json", "done.json"
_MASTER_ENDED = "the master ended before it had all rows; slobench collect added them"


class KeptShare(NamedTuple):
    """A share whose rows a worker keeps: its folder, the run's name and the number of the share."""

    folder: Path
    run: str
    shard: int

    @property
    def part(self) -> Path:
        return self.folder / f"shard-{self.shard}.npz"

    def note(self) -> None:
        """Writes the file by which `kept_shares` finds the share."""
        (self.folder / SHARE).write_text(json.dumps({"run": self.run, "shard": self.shard}))


def kept_shares(places: Sequence[Path]) -> list[KeptShare]:
    """The shares with recorded rows in the folders of `places`. Raises RunInvalid for a damaged
    description."""
    shares = []
    for path in sorted(path for place in places for path in place.glob(f"*/{SHARE}")):
        try:
            content = json.loads(read_result(path))
            share = KeptShare(path.parent, str(content["run"]), int(content["shard"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunInvalid(f"{path}: damaged: {error}") from None
        if share.part.is_file():
            shares.append(share)
    return shares


def collect(directory: Path, places: Sequence[Path]) -> list[KeptShare]:
    """Adds the rows that workers keep in `places` to the run in `directory` and removes them there.
    Returns the shares that were added.

    Raises UsageError if there are none, RunInvalid if they do not belong to the run's schedule.
    """
    manifest, instrument = store.read_manifest_file(directory)
    shares = [share for share in kept_shares(places) if share.run == manifest.run]
    if not shares:
        searched = ", ".join(map(str, places)) or "no folder"
        raise UsageError(f"{directory}: no worker keeps rows of run {manifest.run} in {searched}")
    parts = directory / "parts"
    parts.mkdir(exist_ok=True)
    if (directory / "requests.parquet").is_file():
        _take_apart(directory, parts)
    known = np.concatenate(
        [np.empty(0, "u4"), *(part[0]["request_id"] for part in store.read_parts(parts))]
    )
    added, reports = [], list(instrument.shards)
    for share in shares:
        ids = store.read_part(share.part)[0]["request_id"]
        if np.isin(ids, known).all():
            continue  # the master had them, but its confirmation was lost
        shutil.copyfile(share.part, parts / f"shard-{share.shard}-collected.npz")
        known = np.append(known, ids)
        reports += _report(share)
        added.append(share)
    run = store.read_run(directory)
    if manifest.ended == "running":
        manifest = msgspec.structs.replace(manifest, ended="stopped", end_reason=_MASTER_ENDED)
    run = replace(
        run, manifest=manifest, instrument=ClientReport(tuple(reports), instrument.family_s)
    )
    run = with_start_left_out(with_truncated(with_counted_window(counting_start(run))))
    store.write_run(directory, run, derived(run))
    shutil.rmtree(parts)
    for share in shares:
        shutil.rmtree(share.folder)
    return added


def _take_apart(directory: Path, parts: Path) -> None:
    """Turns the recorded rows of a finished run back into a part, without those that are lost."""
    run = store.read_run(directory)
    rows = run.request_rows[run.request_rows["status"] != Status.lost]
    store.write_part(parts / "shard-recorded.npz", rows, run.chunk_rows, run.names)
    (directory / "requests.parquet").unlink()


def _report(share: KeptShare) -> list[SelfReport]:
    """The load process's report on itself; none if it ended before it wrote the report."""
    path = share.folder / DONE
    if not path.is_file():
        return []
    return [read_section(json.loads(read_result(path)), SelfReport, str(path))]
