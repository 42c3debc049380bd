"""Recorded rows of a shard: requests as received, parts of decoded rows (docs/decisions/0060)."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from loadgen.archive.exchange import Exchange
from loadgen.archive.part_decoder import (
    CLAIMED,
    RAW,
    Advance,
    Ended,
    PartDecoder,
    RawFile,
    RawHead,
    Unsent,
    claim,
    part_of,
)
from loadgen.archive.store import Ids, Part, write_part
from loadgen.drive.decoder_process import DecoderProcess
from loadgen.records import Schedule, Status
from targets.safe_text import SecretForms

PART_REQUESTS, PART_BYTES = 4096, 16 << 20
"""The most requests, and bytes of answers, of a part that is written during the run."""
_UNSENT_ROWS = 1 << 16  # of a part
_FREED_REQUESTS = 8  # at a time: to free 4096 answers of 16 MiB takes milliseconds


class ShardRecorder:
    """The recorder of a shard.

    Ended requests are kept as received. As soon as they fill a part, `write` appends their bytes to
    a file, without `secrets`. `helper` decodes the files, with `decodes_meanwhile` while the run
    goes on, else after it. After an error, such as of a full disk, `write` keeps everything in
    memory. `finish` decodes everything else and writes the last part to `part_path`; the others
    have its name and a number. `on_unwritten` receives each part that cannot be written.
    `epoch_ns` may be set at any time before the first `write`.
    """

    def __init__(
        self,
        schedule: Schedule,
        decoder: PartDecoder,
        part_path: Path,
        helper: DecoderProcess | None = None,
        decodes_meanwhile: bool = False,
        on_full: Callable[[], None] = lambda: None,
        part_requests: int = PART_REQUESTS,
        part_bytes: int = PART_BYTES,
        secrets: SecretForms | None = None,
        on_unwritten: Callable[[str, Part], None] | None = None,
    ) -> None:
        self.epoch_ns = 0
        self._secrets = secrets or SecretForms(())
        self._on_unwritten = on_unwritten
        self._decoder, self._part_path = decoder, part_path
        self._helper, self._decodes_meanwhile = helper, decodes_meanwhile
        self._on_full, self._most_requests, self._most_bytes = on_full, part_requests, part_bytes
        self._request_ids, self._reasons, self._reason_id = array("I"), Ids(), array("H")
        self.released_s = array("d")
        """The release time of each row, seconds; NaN before."""
        self._status = bytearray()  # of rows that were not sent
        self._is_ended = bytearray()  # a sent row
        self.add_rows(schedule)
        self._ended: list[Ended] = []  # of the next part
        self._n_bytes = 0
        self._full: deque[list[Ended]] = deque()
        self._file: RawFile | None = None  # of the first full part
        self._n_in_file = self._reads_in_file = self._bytes_in_file = 0
        self._spent: list[Ended] = []  # written; freed bit by bit
        self._has_failed = False  # to write a file
        self._raw: list[Path] = []
        self.n_reads = 0  # socket reads with body bytes; complete after `finish`
        self.written_bytes = 0
        """Bytes of answers that were written to files as received."""
        self.helper_cpu_s = 0.0
        """CPU time of `helper`; known after `finish`."""

    def add_rows(self, rows: Schedule) -> None:
        """Adds rows after the last."""
        self._request_ids.frombytes(rows["request_id"].tobytes())
        self.released_s.extend(array("d", [math.nan]) * len(rows))
        self._status += bytearray([Status.lost]) * len(rows)
        self._reason_id.frombytes(bytes(2 * len(rows)))
        self._is_ended += bytes(len(rows))

    # called by the dispatcher and the client
    def released(self, row: int, release_s: float) -> None:
        self.released_s[row] = release_s

    def unsent(self, row: int, status: Status, reason: str) -> None:
        self._status[row], self._reason_id[row] = status, self._reasons.id(reason)

    def ended(self, exchange: Exchange) -> None:
        row = exchange.row
        self._is_ended[row] = 1
        self._ended.append(Ended(self._request_ids[row], self.released_s[row], exchange))
        self._n_bytes += exchange.n_bytes
        if len(self._ended) >= self._most_requests or self._n_bytes >= self._most_bytes:
            self._full.append(self._ended)
            self._ended, self._n_bytes = [], 0
            self._on_full()

    def write(self, for_s: float = float("inf")) -> bool:
        """Writes full parts, as received, for about `for_s` seconds. Returns True if there are
        more."""
        until_s = time.monotonic() + for_s
        try:
            while (self._full or self._spent) and not self._has_failed:
                if self._spent and time.monotonic() <= until_s:
                    del self._spent[-_FREED_REQUESTS:]
                    continue
                if self._spent:
                    return True
                if self._file is None:
                    head = RawHead.of(self.epoch_ns, self._decoder.adapter)
                    self._file = RawFile(self._numbered(RAW), head, self._secrets)
                if self._n_in_file == len(self._full[0]):
                    self._close()
                    continue
                if time.monotonic() > until_s:
                    return True
                self._append(self._full[0][self._n_in_file])
        except OSError as error:
            self._give_up_files(error)
        return False

    def finish(self, lost: str = "", advance: Advance = lambda n_bytes: None) -> None:
        """Writes every row. Rows without a recorded end get the status `lost` with the reason
        `lost`. Calls `advance` before each step with the bytes that the step works on. Raises the
        first OSError after it has written all that can be written; with `on_unwritten` none: files
        that cannot be decoded stay for the controlling process."""
        if self._file is not None:
            others = [*self._full][1:]
            self._full = deque([self._full[0]])
            self.write()
            self._full.extend(others)
        for path in () if self._decodes_meanwhile else self._raw:
            self._hand_over(path)
        steps: list[Callable[[], None]] = []
        for full in self._full:
            self._raw.append(self._numbered(RAW))
            steps.append(partial(self._write_full, full, part_of(self._raw[-1]), advance))
        # the helper begins with the first
        steps += [partial(self._decode_unclaimed, path, advance) for path in reversed(self._raw)]
        steps.append(partial(self._write_last, lost, advance))
        steps.append(partial(self._end_helper, advance))
        steps += [partial(self._decode_claimed, path, advance) for path in self._raw]
        errors = []
        for step in steps:
            try:
                step()
            except OSError as error:
                errors.append(error)
        if errors and self._on_unwritten is None:
            raise errors[0]
        for left in errors:
            log(f"{left.filename}: {left.strerror or left}; its file stays as it is")

    def _write_full(self, full: list[Ended], path: Path, advance: Advance) -> None:
        self.n_reads += sum(len(set(ended.exchange.times)) for ended in full)
        self._write_part(path, self._decoder.part(full, self.epoch_ns, advance=advance), advance)

    def _decode_unclaimed(self, path: Path, advance: Advance) -> None:
        if claim(path):
            self._decoder.decode_file(path, advance)

    def _decode_claimed(self, path: Path, advance: Advance) -> None:
        """Decodes a file that was left by a helper that failed."""
        if path.with_suffix(CLAIMED).exists():
            self._decoder.decode_file(path, advance)

    def _end_helper(self, advance: Advance) -> None:
        if self._helper is not None:
            self.helper_cpu_s = self._helper.finish(lambda: advance(0))

    def _write_last(self, lost: str, advance: Advance) -> None:
        """Writes the requests in memory, and the rows that were not sent."""
        self.n_reads += sum(len(set(ended.exchange.times)) for ended in self._ended)
        rows = np.flatnonzero(~np.frombuffer(self._is_ended, bool))
        reasons = (*self._reasons.texts(), lost or "no end was recorded")
        status = np.frombuffer(self._status, np.uint8)
        reason_ids = np.where(status == Status.lost, len(reasons) - 1, self._reason_id)
        shares = np.split(rows, range(_UNSENT_ROWS, len(rows), _UNSENT_ROWS))
        for share in shares:
            is_last = share is shares[-1]
            unsent = Unsent(
                np.asarray(self._request_ids)[share],
                np.asarray(self.released_s)[share],
                status[share],
                reason_ids[share],
                reasons,
            )
            ended = self._ended if is_last else ()
            part = self._decoder.part(ended, self.epoch_ns, unsent, advance)
            if not is_last:
                self._raw.append(self._numbered(RAW))
            path = self._part_path if is_last else part_of(self._raw[-1])
            self._write_part(path, part, advance)

    def _write_part(self, path: Path, part: Part, advance: Advance) -> None:
        try:
            write_part(path, *part, lambda: advance(0))
        except OSError as error:
            if self._on_unwritten is None:
                raise
            log(f"{path}: {error.strerror or error}; its rows go to the controlling process")
            self._on_unwritten(path.name, part)

    def _numbered(self, suffix: str) -> Path:
        return self._part_path.with_name(f"{self._part_path.stem}-{len(self._raw):04}{suffix}")

    def _append(self, ended: Ended) -> None:
        assert self._file is not None, "no file is open"
        self._file.append(ended)
        self._n_in_file += 1
        self._reads_in_file += len(set(ended.exchange.times))
        self._bytes_in_file += ended.exchange.n_bytes

    def _close(self) -> None:
        """Ends the file of the first full part."""
        assert self._file is not None, "no file is open"
        self._raw.append(self._file.close())
        self._spent = self._full.popleft()
        self.n_reads += self._reads_in_file
        self.written_bytes += self._bytes_in_file
        self._file = None
        self._n_in_file = self._reads_in_file = self._bytes_in_file = 0
        if self._decodes_meanwhile:
            self._hand_over(self._raw[-1])

    def _give_up_files(self, error: OSError) -> None:
        """Keeps this part and all further parts in memory."""
        self._has_failed = True
        if self._file is not None:
            self._file.remove()
            self._file = None
        path = self._numbered(RAW)
        log(f"{path}: {error.strerror or error}; requests are kept in memory")

    def _hand_over(self, path: Path) -> None:
        if self._helper is not None:
            self._helper.decode(path)


def log(line: str) -> None:
    """Writes a line into the log, unless its disk is full, too."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
