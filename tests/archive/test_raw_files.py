"""Files of requests as received: damage, disk faults, secrets, a frozen helper."""

import errno
import os
import random
import signal

import numpy as np
import pytest

from loadgen.archive.exchange import Exchange
from loadgen.archive.part_decoder import (
    PartDecoder,
    RawFile,
    RawHead,
    decode_left,
    n_recorded,
    read_raw,
)
from loadgen.archive.store import Part, merge_parts, read_parts
from loadgen.drive.decoder_process import DecoderProcess
from loadgen.drive.prefork import may_fork
from loadgen.drive.recorder import ShardRecorder
from loadgen.errors import RunInvalid
from loadgen.records import SCHEDULE, Status
from targets.openai_chat import OpenAIChat
from targets.safe_text import SecretForms

pytestmark = pytest.mark.faults
KEY = "sk-do-not-show-me"
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":"stop"}]}\n\n'


def answered(row, text=b"x"):
    made = Exchange(row, sent_ns=10**9, http_status=200, headers_ns=10**9, done_ns=2 * 10**9)
    made.content_type, body = "text/event-stream", EVENT % text + b"data: [DONE]\n\n"
    made.parts = [body[at : at + 9] for at in range(0, len(body), 9)]
    made.times = [10**9 + at for at in range(len(made.parts))]
    made.n_bytes = len(body)
    return made


def schedule_of(n):
    schedule = np.zeros(n, SCHEDULE)
    schedule["request_id"] = np.arange(n)
    return schedule


def recorder_of(folder, n, **options):
    decoder = PartDecoder(1, OpenAIChat())
    return ShardRecorder(schedule_of(n), decoder, folder / "shard-1.npz", **options)


def end_rows(recorder, rows, text=b"x"):
    for row in rows:
        recorder.released(row, 0.5)
        recorder.ended(answered(row, text))


def statuses(folder, n):
    return merge_parts(schedule_of(n), read_parts(folder))[0]["status"].tolist()


def read_whole(path):
    raw = read_raw(path)
    assert raw is not None
    return raw


def raw_file(folder, suffix=".raw"):
    recorder = recorder_of(folder, n=3, part_requests=3)
    end_rows(recorder, range(3))
    recorder.write()
    (path,) = folder.iterdir()
    return path.rename(path.with_suffix(suffix))


@pytest.mark.parametrize("suffix", [".partial", ".raw", ".claimed"])
def test_each_flipped_bit_is_an_error_that_names_the_file(tmp_path, suffix):
    path, rng = raw_file(tmp_path, suffix), random.Random(7)
    whole = path.read_bytes()
    for bit in rng.sample(range(8 * len(whole)), 100):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(RunInvalid, match=rf"shard-1-0000\{suffix}: damaged: "):
            decode_left(tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_only_a_file_that_was_being_written_may_be_cut(tmp_path):
    path = raw_file(tmp_path)
    whole, partial = path.read_bytes(), path.with_suffix(".partial")
    n_rows = set()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        partial.write_bytes(whole[:size])
        head_and_rows = read_raw(partial)
        n_rows.add(0 if head_and_rows is None else len([*head_and_rows[1]]))
        try:
            raw = read_raw(path)
            assert raw is not None
            assert len([*raw[1]]) in n_rows, "cut between two records"
        except RunInvalid as error:
            assert str(path) in str(error)  # noqa: PT017
    assert n_rows == {0, 1, 2}


def test_the_rows_of_files_are_decoded_by_the_codec_that_their_head_names(tmp_path):
    path = raw_file(tmp_path)
    head, _ = read_whole(path)
    codec = OpenAIChat(model=KEY, extra_body={"api_key": KEY}, continuous_usage=True)
    assert KEY not in str(RawHead.of(5, codec))
    assert RawHead.of(5, codec).adapter() == OpenAIChat(continuous_usage=True)
    assert head.adapter() == OpenAIChat()
    decode_left(tmp_path)
    assert statuses(tmp_path, 3) == [Status.ok] * 3


@pytest.mark.parametrize("n_written", [0, 1, 4, 5])
@pytest.mark.parametrize("step", ["append", "close"])
def test_after_a_disk_error_rows_are_kept_in_memory(tmp_path, monkeypatch, step, n_written, capfd):
    recorder, calls = recorder_of(tmp_path, n=9, part_requests=3), []
    original = getattr(RawFile, step)

    def failing(*arguments):
        calls.append(step)
        if len(calls) > n_written:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments)

    monkeypatch.setattr(RawFile, step, failing)
    for row in range(9):
        end_rows(recorder, [row])
        recorder.write()
    assert not [*tmp_path.glob("*.partial")]
    fails = step == "append" or n_written < 3
    assert capfd.readouterr().err.count("No space left on device; requests are kept") == fails
    monkeypatch.undo()
    recorder.finish()
    assert {path.suffix for path in tmp_path.iterdir()} == {".npz"}
    assert statuses(tmp_path, 9) == [Status.ok] * 9
    assert recorder.n_reads == 9 * len(answered(0).parts)


def test_a_file_that_cannot_be_decoded_costs_no_other_row(tmp_path, monkeypatch):
    recorder = recorder_of(tmp_path, n=7, part_requests=3)
    end_rows(recorder, range(7))
    recorder.write()
    original = PartDecoder.decode_file

    def failing(self, path, *arguments):
        if path.name == "shard-1-0001.raw":
            raise OSError(errno.EIO, "Input/output error")
        original(self, path, *arguments)

    monkeypatch.setattr(PartDecoder, "decode_file", failing)
    with pytest.raises(OSError, match="Input/output error"):
        recorder.finish()
    monkeypatch.undo()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["shard-1-0000.npz", "shard-1-0001.claimed", "shard-1.npz"]
    decode_left(tmp_path)
    assert statuses(tmp_path, 7) == [Status.ok] * 7


def test_a_secret_that_a_server_repeats_reaches_no_file(tmp_path):
    secrets = SecretForms([f"Bearer {KEY}", KEY[:-3], "data"])
    recorder = recorder_of(tmp_path, n=2, part_requests=1, secrets=secrets)
    end_rows(recorder, [0], text=b"the key %s is wrong" % KEY.encode())
    end_rows(recorder, [1])
    recorder.write()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    assert not any(KEY.encode()[:8] in path.read_bytes() for path in files)
    exchanges = [next(read_whole(path)[1]).exchange for path in files]
    sent = [answered(0, b"the key %s is wrong" % KEY.encode()), answered(1)]
    for kept, before in zip(exchanges, sent, strict=True):
        assert [len(part) for part in kept.parts] == [len(part) for part in before.parts]
        assert kept.times == before.times
    assert b"the key %s is wrong" % (b"*" * len(KEY)) in b"".join(exchanges[0].parts)
    assert exchanges[1].parts == sent[1].parts
    recorder.finish()
    assert statuses(tmp_path, 2) == [Status.ok] * 2


def test_a_secret_in_the_headers_of_a_failed_answer_reaches_no_file(tmp_path):
    recorder = recorder_of(tmp_path, n=1, part_requests=1, secrets=SecretForms([KEY]))
    failed = answered(0)
    failed.http_status, failed.limits = 429, f"x-ratelimit-limit-key: {KEY}\nretry-after: 2\n"
    recorder.released(0, 0.5)
    recorder.ended(failed)
    recorder.write()
    (path,) = tmp_path.iterdir()
    assert KEY.encode() not in path.read_bytes()
    kept = next(read_whole(path)[1]).exchange
    assert kept.limits == f"x-ratelimit-limit-key: {'*' * len(KEY)}\nretry-after: 2\n"


@pytest.mark.skipif(not may_fork(), reason="this process has other threads")
def test_a_frozen_helper_is_killed_and_costs_no_row(tmp_path):
    helper = DecoderProcess(PartDecoder(1, OpenAIChat()), is_idle=False)
    os.kill(helper.pid, signal.SIGSTOP)
    recorder = recorder_of(tmp_path, n=7, part_requests=3, helper=helper)
    end_rows(recorder, range(7))
    recorder.write()
    n_advances: list[int] = []
    recorder.finish(advance=n_advances.append)
    assert statuses(tmp_path, 7) == [Status.ok] * 7
    assert {path.suffix for path in tmp_path.iterdir()} == {".npz"}
    assert n_advances.count(0) >= 3, "this process counts as working while it waits"
    with pytest.raises(ChildProcessError):
        os.waitpid(helper.pid, 0)


@pytest.mark.parametrize("name", ["shard-1.npz", "shard-1-0001.npz"])
def test_rows_that_cannot_be_written_at_the_end_are_handed_up(tmp_path, name, capfd):
    handed_up: dict[str, Part] = {}
    recorder = recorder_of(
        tmp_path,
        n=7,
        part_requests=3,
        on_unwritten=lambda name, part: handed_up.update({name: part}),
    )
    (tmp_path / f"{name}.partial").mkdir()  # no file can be written there, as on a full disk
    end_rows(recorder, range(7))
    recorder.finish()
    assert [*handed_up] == [name]
    parts = [*read_parts(tmp_path), *handed_up.values()]
    assert merge_parts(schedule_of(7), parts)[0]["status"].tolist() == [Status.ok] * 7
    assert (
        f"{name}: Is a directory; its rows go to the controlling process" in capfd.readouterr().err
    )


def test_a_file_whose_part_cannot_be_written_is_left_to_the_controlling_process(tmp_path):
    handed_up: dict[str, Part] = {}
    unwritten: list[Part] = []
    recorder = recorder_of(
        tmp_path,
        n=4,
        part_requests=3,
        on_unwritten=lambda name, part: handed_up.update({name: part}),
    )
    (tmp_path / "shard-1-0000.npz.partial").mkdir()
    end_rows(recorder, range(4))
    recorder.write()
    recorder.finish()
    assert not handed_up
    assert n_recorded(tmp_path) == 4  # three of them as received
    decode_left(tmp_path, unwritten=unwritten)
    assert [len(rows) for rows, _, _ in unwritten] == [3]
    parts = [*read_parts(tmp_path), *unwritten]
    assert merge_parts(schedule_of(4), parts)[0]["status"].tolist() == [Status.ok] * 4
    with pytest.raises(IsADirectoryError):
        decode_left(tmp_path)
