"""Recorded rows of a shard: requests as received, parts of decoded rows (docs/decisions/0060)."""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from loadgen.drive.decoder_process import DecoderProcess
from loadgen.drive.part_decoder import (
    CLAIMED,
    RAW,
    Ended,
    PartDecoder,
    RawFile,
    Unsent,
    claim,
    part_of,
)
from loadgen.drive.store import Ids, write_part
from loadgen.drive.transport import Exchange
from loadgen.records import Schedule, Status

PART_REQUESTS, PART_BYTES = 4096, 16 << 20
"""The most requests, and bytes of answers, of a part that is written during the run."""
_UNSENT_ROWS = 1 << 16  # of a part


class ShardRecorder:
    """The recorder of a shard.

    Ended requests are kept as received. As soon as they fill a part, `write` appends their bytes to
    a file. `helper` decodes the files, with `decodes_meanwhile` while the run goes on, else after
    it. `finish` decodes everything else and writes the last part to `part_path`; the others have
    its name and a number. `epoch_ns` may be set at any time before the first `write`.
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
    ) -> None:
        self.epoch_ns = 0
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
        self._full: deque[deque[Ended]] = deque()
        self._file: RawFile | None = None
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
            self._full.append(deque(self._ended))
            self._ended, self._n_bytes = [], 0
            self._on_full()

    def write(self, for_s: float = float("inf")) -> bool:
        """Writes full parts, as received, for about `for_s` seconds. Returns True if there are
        more."""
        until_s = time.monotonic() + for_s
        while self._full:
            if self._file is None:
                self._file = RawFile(self._numbered(RAW))
            if not self._full[0]:
                self._close()
                continue
            if time.monotonic() > until_s:
                return True
            ended = self._full[0].popleft()
            self.n_reads += len(set(ended.exchange.times))
            self.written_bytes += ended.exchange.n_bytes
            self._file.append(ended)
        return False

    def finish(self, lost: str = "", advance: Callable[[int], None] = lambda n_bytes: None) -> None:
        """Writes every row. Rows without a recorded end get the status `lost` with the reason
        `lost`. Calls `advance` before each step with the bytes that the step works on."""
        if self._file is not None:
            rest = self._full[0]
            self._full, others = deque([rest]), [*self._full][1:]
            self.write()
            self._full.extend(others)
        for path in () if self._decodes_meanwhile else self._raw:
            self._hand_over(path)
        for full in self._full:
            self.n_reads += sum(len(set(ended.exchange.times)) for ended in full)
            part = self._decoder.part(full, self.epoch_ns, advance=advance)
            self._raw.append(self._numbered(RAW))
            write_part(part_of(self._raw[-1]), *part)
        for path in reversed(self._raw):  # the helper begins with the first
            if claim(path):
                self._decoder.decode_file(path, self.epoch_ns, advance)
        if self._helper is not None:
            self.helper_cpu_s = self._helper.finish()
        for path in self._raw:  # left by a helper that failed
            if path.with_suffix(CLAIMED).exists():
                self._decoder.decode_file(path, self.epoch_ns, advance)
        self._write_last(lost, advance)

    def _write_last(self, lost: str, advance: Callable[[int], None]) -> None:
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
            write_part(path, *part, lambda: advance(0))

    def _numbered(self, suffix: str) -> Path:
        return self._part_path.with_name(f"{self._part_path.stem}-{len(self._raw):04}{suffix}")

    def _close(self) -> None:
        """Ends the file of the first full part."""
        assert self._file is not None, "no file is open"
        self._full.popleft()
        self._raw.append(self._file.close())
        self._file = None
        if self._decodes_meanwhile:
            self._hand_over(self._raw[-1])

    def _hand_over(self, path: Path) -> None:
        if self._helper is not None:
            self._helper.decode(path, self.epoch_ns)
