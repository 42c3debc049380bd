"""Valid and invalid data of workers: no share may spoil the others'."""

import base64
import io
import math
import zipfile
import zlib

import msgspec
import numpy as np
import pytest

from loadgen.archive.store import write_part
from loadgen.live.live_histogram import LiveCounts
from loadgen.records import CHUNKS, SCHEDULE, Names, Status, empty_requests
from loadgen.web.control_messages import Bad, ClassCounts, Frame
from loadgen.web.validate import check_frame, check_part

IDS = np.array([3, 5, 8], np.uint32)
NOBODY = [0] * len(Status)


def counted(n):
    one = LiveCounts()
    one.add([0.1] * n)
    return one.encode()


def bomb():
    data = base64.b64decode(counted(1))
    return base64.b64encode(data[:8] + zlib.compress(bytes(64 << 20)))


FRAME = Frame(
    "r", 0, 1, 1.5, 10, 10, 0, 0, [9, 1, *NOBODY[2:]], 0,
    {"ttft": counted(10), "itl": counted(99), "of a later version": b"?"},
    {"default": ClassCounts([9, 1, *NOBODY[2:]], 9, 50)},
)  # fmt: skip


def test_a_frame_of_the_whole_share_is_taken():
    check_frame(FRAME, 10)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"by_status": [50, *NOBODY[1:]]}, "50 requests ended, of 10 in its share"),
        ({"sent": 11}, "11 requests sent, of 10"),
        ({"released": 1 << 60}, "requests released, of 10"),
        ({"now_s": math.nan}, "the time nan"),
        ({"now_s": math.inf}, "the time inf"),
        ({"classes": dict.fromkeys("ab", FRAME.classes["default"])}, "its classes count"),
        ({"histograms": {"e2e": counted(11)}}, "e2e of 11 requests, of 10"),
        ({"histograms": {"itl": b"HISTFAAA"}}, "itl: not an HdrHistogram"),
        ({"histograms": {"itl": bomb()}}, "more than 262144 bytes unpacked"),
    ],
)
def test_a_frame_that_cannot_be_is_refused(changes, why):
    with pytest.raises(Bad, match=why):
        check_frame(msgspec.structs.replace(FRAME, **changes), 10)


def test_a_histogram_with_other_bounds_is_refused():
    from hdrh.histogram import HdrHistogram

    with pytest.raises(ValueError, match="1 to 1000000000000 µs with 5 digits"):
        LiveCounts().add_encoded(HdrHistogram(1, 10**12, 5).encode())


def part(tmp_path, ids=IDS, names=Names(), chunk_ids=(3, 8), **columns):  # noqa: B008
    schedule = np.zeros(len(ids), SCHEDULE)
    schedule["request_id"] = ids
    rows = empty_requests(schedule)
    for name, value in columns.items():
        rows[name] = value
    chunks = np.zeros(len(chunk_ids), CHUNKS)
    chunks["request_id"] = chunk_ids
    write_part(tmp_path / "part.npz", rows, chunks, names)
    return (tmp_path / "part.npz").read_bytes()


def test_the_rows_of_a_share_are_taken(tmp_path):
    check_part(part(tmp_path), IDS)
    named = Names(errors=("", "boom"), remotes=("", "10.0.0.1"))
    check_part(part(tmp_path, names=named, error_id=1, remote_id=[0, 1, 1]), IDS)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ids": [3, 5]}, "not those of its share"),
        ({"ids": [3, 5, 9]}, "not those of its share"),
        ({"chunk_ids": [4]}, "chunks belong to requests outside"),
        ({"status": 77}, "an unknown status"),
        ({"error_id": [0, 0, 1]}, "error_id column has numbers without an entry in errors"),
        ({"remote_id": 9}, "remote_id column has numbers without an entry in remotes"),
    ],
)
def test_rows_that_do_not_fit_are_refused(tmp_path, changes, why):
    with pytest.raises(Bad, match=why):
        check_part(part(tmp_path, **changes), IDS)


def test_rows_that_cannot_be_decoded_are_rejected(tmp_path):
    whole = part(tmp_path)
    for data in (b"", b"no rows", whole[:-40], whole[: len(whole) // 2]):
        with pytest.raises(Bad, match="cannot be read"):
            check_part(data, IDS)


def test_rows_are_not_unpacked(tmp_path):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("requests.npy", bytes(8 << 20))
    with pytest.raises(Bad, match="unpack to 8388608 bytes"):
        check_part(packed.getvalue(), IDS)


def test_a_table_of_another_version_is_refused(tmp_path):
    odd = io.BytesIO()
    np.savez(odd, requests=IDS, chunks=np.empty(0, CHUNKS), errors=[""], remotes=[""])
    with pytest.raises(Bad, match="columns of its table requests are not"):
        check_part(odd.getvalue(), IDS)
