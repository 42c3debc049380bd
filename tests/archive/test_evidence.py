"""A run directory that is damaged, mixed or incomplete is never read as if it were whole."""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from pyarrow import parquet

import slobench
from loadgen.archive import checksums, store
from loadgen.archive.exchange import Exchange
from loadgen.archive.part_decoder import Ended, RawFile, RawHead
from loadgen.cli.app import app
from loadgen.cli.exit_codes import guarded
from loadgen.errors import RunInvalid, SlobenchError, UsageError
from loadgen.lab.engine_log import misses
from loadgen.manifest.self_report import ClientReport
from loadgen.measure.aggregate import summarize
from loadgen.records import SERVER, Status
from loadgen.run.conclude import conclude
from targets.openai_chat import OpenAIChat
from targets.safe_text import SecretForms
from tests.runs import measured_run, rewrite_manifest, with_manifest, write_to

SLO = ["p90(ttft) <= 500ms"]
EVIDENCE = ["manifest.json", "schedule.parquet", "edges.parquet", "requests.parquet",
            "chunks.parquet", "server.parquet"]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory, page_cache):
    """The directory of a finished run with its page, a log and the server's metrics."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    run = measured_run(n_requests=60, slo=SLO)
    names = replace(run.names, series=("running",))
    server = np.array([(0.5, 0, 3.0), (1.5, 0, 4.0)], SERVER)
    write_to(directory, replace(run, names=names, server_rows=server))
    (directory / "logs").mkdir()
    (directory / "logs" / "shard-0.log").write_text("nothing to report\n" * 20)
    conclude(directory, None, None, page_cache)
    checksums.cover_rest(directory)
    return directory


@pytest.fixture
def directory(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def summary_of(directory):
    return json.dumps(summarize(store.read_run(directory)).to_json(), sort_keys=True)


def rows_of(directory):
    run = store.read_run(directory)
    return [rows.tobytes() for rows in (run.request_rows, run.chunk_rows, run.schedule_rows)]


def outcome(read, directory):
    """The result, or the error that the command line would print."""
    try:
        return read(directory)
    except SlobenchError as error:
        return error


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_every_file_is_listed_as_sha256sum_writes_it(directory):
    result = subprocess.run(
        ["sha256sum", "-c", "--strict", checksums.NAME],
        cwd=directory, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    checked = {line.partition(":")[0] for line in result.stdout.splitlines()}
    files = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}
    assert checked == files - {checksums.NAME}
    assert {*EVIDENCE, "summary.json", "report.html", "logs/shard-0.log"} == checked


@pytest.mark.faults
def test_300_bit_flips_are_errors_that_name_the_file_or_change_nothing(directory):
    """The same number of flips in each file, at random places; seed 22."""
    rng = random.Random(22)
    before = summary_of(directory)
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    assert len(files) == 10
    n_errors = 0
    for file in files:
        whole, name = file.read_bytes(), file.relative_to(directory).as_posix()
        for _ in range(30):
            bit = rng.randrange(8 * len(whole))
            flip(file, bit)
            problems = checksums.problems(directory)
            assert any(name in problem for problem in problems), (name, bit, problems)
            read = outcome(summary_of, directory)
            n_errors += isinstance(read, SlobenchError)
            assert read == before or name in str(read), (name, bit, read)
            assert read != before or name not in EVIDENCE, (name, bit)
            file.write_bytes(whole)
    assert n_errors >= 30 * len(EVIDENCE)
    assert checksums.problems(directory) == []


def printed(capsys, *words):
    """(exit code, output) of a command line."""
    code = guarded(lambda: app([str(word) for word in words]), {})
    out, err = capsys.readouterr()
    return code, out + err


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("n_flips", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_each_verb_names_a_flipped_file_or_prints_what_it_printed(
    finished, tmp_path, capsys, n_flips
):
    """`verify` names every flip; `report`, `rescore` and `compare` name it unless their output is
    that of the intact run."""
    other, damaged = shutil.copytree(finished, tmp_path / "other"), tmp_path / "run"
    files = sorted(p.relative_to(finished) for p in finished.rglob("*") if p.is_file())
    verbs = [("verify", damaged), ("rescore", damaged), ("compare", other, damaged),
             ("report", damaged)]  # fmt: skip
    shutil.copytree(finished, damaged)
    intact = {verb: printed(capsys, *verb) for verb in verbs}
    assert {code for code, _ in intact.values()} <= {0, 1}
    rng, n_named = random.Random(220 + n_flips), 0
    for k in range(n_flips):
        name = files[k % len(files)]
        shutil.rmtree(damaged)
        shutil.copytree(finished, damaged)
        flip(damaged / name, rng.randrange(8 * (damaged / name).stat().st_size))
        for verb in verbs:
            code, text = printed(capsys, *verb)
            is_named = code == 3 and str(name) in text
            n_named += is_named
            assert is_named or (verb[0] != "verify" and (code, text) == intact[verb]), (
                verb, name, code, text,
            )  # fmt: skip
    assert n_named >= 2.5 * n_flips


@pytest.mark.faults
@pytest.mark.parametrize("name", EVIDENCE)
def test_a_file_that_is_cut_or_missing_is_named(directory, name):
    whole = (directory / name).read_bytes()
    for n_bytes in (0, len(whole) // 2, len(whole) - 1):
        (directory / name).write_bytes(whole[:n_bytes])
        with pytest.raises(RunInvalid, match=f"{name}: damaged"):
            store.read_run(directory)
    (directory / name).unlink()
    with pytest.raises(SlobenchError, match=name):
        store.read_run(directory)
    assert any(name in problem for problem in checksums.problems(directory))


@pytest.mark.faults
@pytest.mark.parametrize("name", EVIDENCE[1:5])
def test_a_file_of_another_run_is_refused(directory, tmp_path, name):
    """Also where checksums were taken again afterwards: the files do not agree."""
    other = with_manifest(measured_run(n_requests=61, seed=8), run="other")
    write_to(tmp_path / "other", other)
    shutil.copy(tmp_path / "other" / name, directory / name)
    with pytest.raises(RunInvalid, match=f"{name}: damaged"):
        store.read_run(directory)
    checksums.cover(directory, directory / name)
    with pytest.raises(RunInvalid, match=rf"{name}: damaged: it is of another run .*'other'"):
        store.read_run(directory)


@pytest.mark.faults
def test_files_of_equal_marks_must_agree(directory):
    run = store.read_run(directory)
    fewer = replace(run, chunk_rows=run.chunk_rows[:-1])
    store.write_run(directory, fewer, {})
    with pytest.raises(RunInvalid, match=r"chunks\.parquet: its 1199 chunks are not those"):
        store.read_run(directory)
    store.write_run(directory, replace(run, request_rows=run.request_rows[1:]), {})
    with pytest.raises(RunInvalid, match=r"requests\.parquet: its 59 requests are not the 60"):
        store.read_run(directory)
    moved = run.schedule_rows.copy()
    moved["scheduled_s"] += 1.0
    store.write_schedule(directory, replace(run, schedule_rows=moved))
    store.write_run(directory, run, {})
    with pytest.raises(RunInvalid, match=r"schedule\.parquet: is not the schedule"):
        store.read_run(directory)
    store.write_schedule(directory, with_manifest(run, n_requests=61))
    store.write_run(directory, with_manifest(run, n_requests=61), {})
    with pytest.raises(RunInvalid, match=r"has 60 rows, and manifest\.json states 61"):
        store.read_run(directory)


@pytest.mark.faults
def test_a_file_that_slobench_reads_must_be_listed_and_others_may_be_added(directory):
    (directory / "notes.txt").write_text("the fan was loud\n")
    assert checksums.problems(directory) == []
    text = (directory / checksums.NAME).read_text()
    lines = [line for line in text.splitlines(keepends=True) if "server.parquet" not in line]
    (directory / checksums.NAME).write_text("".join(lines))
    with pytest.raises(RunInvalid, match=r"server\.parquet: has no line in checksums\.sha256"):
        store.read_run(directory)


@pytest.mark.faults
def test_a_run_without_its_checksums_is_refused(directory):
    (directory / checksums.NAME).unlink()
    with pytest.raises(RunInvalid, match=r"checksums\.sha256: is missing"):
        store.read_run(directory)


@pytest.mark.faults
def test_a_report_verifies_first_and_renews_only_what_it_writes(directory, page_cache):
    log = directory / "logs" / "shard-0.log"
    flip(log, 5)
    flip(directory / "report.html", 1000)
    conclude(directory, ["p90(ttft) <= 10ms"], None, page_cache)
    (problem,) = checksums.problems(directory)
    assert problem.startswith(f"{log}: damaged")
    flip(directory / "chunks.parquet", 5000)
    before = (directory / "summary.json").read_bytes()
    with pytest.raises(RunInvalid, match=r"chunks\.parquet: damaged"):
        conclude(directory, None, None, page_cache)
    assert (directory / "summary.json").read_bytes() == before


@pytest.mark.faults
@pytest.mark.parametrize("instrument", [{}, {"shards": []}, None])
def test_a_run_without_measurements_of_the_load_generator_is_invalid(directory, instrument):
    def change(content):
        kept = {key: value for key, value in content.items() if key != "instrument"}
        return kept if instrument is None else {**kept, "instrument": instrument}

    rewrite_manifest(directory, change)
    found = summarize(store.read_run(directory))
    assert (found.verdict, found.exit_code) == ("no_verdict", 3)
    assert "measurements of itself are missing" in found.reasons[0]


def test_a_simulated_run_needs_no_measurements_of_a_load_generator(directory):
    run = replace(with_manifest(store.read_run(directory), clock="virtual"), instrument=EMPTY)
    assert summarize(run).verdict == "met"


EMPTY = ClientReport()


@pytest.mark.faults
def test_chunks_of_another_run_make_a_run_invalid(directory):
    other = measured_run(n_requests=60, n_tokens=19)
    found = summarize(replace(store.read_run(directory), chunk_rows=other.chunk_rows))
    assert found.verdict == "no_verdict"
    assert "60 of 60 requests have other chunks" in found.reasons[0]


def test_pages_of_a_table_carry_checksums_that_are_verified(directory):
    """Also where checksums.sha256 has the checksum of the damaged file."""
    path = directory / "chunks.parquet"
    with parquet.ParquetFile(path) as file:
        column = file.metadata.row_group(0).column(1)
        at = column.data_page_offset + 200
    assert column.path_in_schema == "received_s"
    flip(path, 8 * at)
    checksums.cover(directory, path)
    with pytest.raises(RunInvalid, match=r"chunks\.parquet: damaged.*(CRC|corrupt)"):
        store.read_run(directory)


@pytest.fixture
def crashed(tmp_path):
    """A run directory as a killed process leaves it: the plan, and the parts of two workers."""
    run = with_manifest(measured_run(n_requests=60, slo=SLO), ended="running")
    whole = write_to(tmp_path / "crashed", run)
    store.write_schedule(tmp_path / "crashed", whole)
    for name in ("requests.parquet", "chunks.parquet"):
        (tmp_path / "crashed" / name).unlink()
    (tmp_path / "crashed" / "parts").mkdir()
    for shard in (0, 1):
        mine = whole.request_rows["request_id"] % 2 == shard
        chunks = whole.chunk_rows[whole.chunk_rows["request_id"] % 2 == shard]
        part = tmp_path / "crashed" / "parts" / f"shard-{shard}.npz"
        store.write_part(part, whole.request_rows[mine], chunks, whole.names)
    return whole, tmp_path / "crashed"


@pytest.mark.faults
def test_a_run_killed_before_its_last_manifest_is_read_from_its_parts(crashed, page_cache):
    """Its tables are whole and listed, and its manifest still says `running`."""
    whole, directory = crashed
    write_to(directory.parent / "whole", whole)
    for name in ("requests.parquet", "chunks.parquet"):
        shutil.copy(directory.parent / "whole" / name, directory)
        checksums.cover(directory, directory / name)
    assert store.has_parts(directory)
    conclude(directory, None, None, page_cache)
    run = store.read_run(directory)
    assert run.manifest.ended == "interrupted"
    assert run.request_rows["status"].tolist() == whole.request_rows["status"].tolist()
    assert not (directory / "parts").exists()
    assert not store.has_parts(directory)


@pytest.mark.faults
def test_300_bit_flips_after_a_crash_are_errors_or_change_nothing(crashed):
    _, directory = crashed
    rng, before, n_errors = random.Random(23), rows_of(crashed[1]), 0
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    assert len(files) == 6
    for file in files:
        whole = file.read_bytes()
        for _ in range(50):
            bit = rng.randrange(8 * len(whole))
            flip(file, bit)
            read = outcome(rows_of, directory)
            assert read == before or file.name in str(read), (file, bit, read)
            n_errors += isinstance(read, SlobenchError)
            file.write_bytes(whole)
    assert n_errors >= 200


@pytest.mark.faults
def test_a_run_killed_while_its_tables_are_written_is_read_from_its_parts(crashed, page_cache):
    """After each of the steps of `write_run` the directory is readable."""
    run, directory = crashed
    done = with_manifest(run, ended="completed")
    kept = shutil.copytree(directory, directory.with_name("kept"))
    store.write_run(directory, done, {})
    after = {name: (directory / name).read_bytes() for name in EVIDENCE[:5]}
    encoded = after["manifest.json"]
    shutil.rmtree(directory)
    shutil.copytree(kept, directory)

    def readable():
        again = store.read_run(directory)
        assert again.request_rows.tobytes() == run.request_rows.tobytes()
        return again.manifest.ended

    for name in ("chunks.parquet", "requests.parquet"):
        (directory / name).write_bytes(after[name])
        assert readable() == "running"
    checksums.cover(directory, directory / "chunks.parquet", directory / "requests.parquet")
    assert readable() == "running"
    checksums.expect(directory, "manifest.json", encoded)
    assert readable() == "running"
    (directory / "manifest.json").write_bytes(encoded)
    assert readable() == "completed"
    checksums.cover(directory, directory / "manifest.json")
    assert readable() == "completed"
    assert checksums.problems(directory) == []


@pytest.mark.faults
@pytest.mark.parametrize("read", [slobench.replay, misses])
def test_a_damaged_engine_log_is_named(directory, read):
    log = directory / "engine_steps.parquet"
    log.write_bytes(bytes(100))
    checksums.cover(directory, log)
    with pytest.raises(UsageError, match=r"engine_steps\.parquet"):
        read(directory)  # as written: no Parquet file
    flip(log, 5)
    with pytest.raises(RunInvalid, match=r"engine_steps\.parquet: damaged"):
        read(directory)


@pytest.fixture
def killed(crashed):
    """The same with the rows of the second worker as received, as after `kill -9` of it."""
    run, directory = crashed
    (directory / "parts" / "shard-1.npz").unlink()
    head = RawHead.of(0, OpenAIChat())
    for number, suffix in enumerate([".raw", ".claimed", ".partial"]):
        path = directory / "parts" / f"shard-1-{number:04}.raw"
        file = RawFile(path, head, SecretForms(()))
        for request_id in range(1 + 20 * number, 21 + 20 * number, 2):
            exchange = Exchange(0, sent_ns=request_id, http_status=500, done_ns=request_id + 1)
            file.append(Ended(request_id, 0.0, exchange))
        file.close().rename(path.with_suffix(suffix))
    return run, directory


@pytest.mark.faults
def test_rows_of_killed_workers_are_decoded_by_report_and_by_nothing_else(killed, page_cache):
    run, directory = killed
    for read in (store.read_run, slobench.read_run):
        with pytest.raises(UsageError, match=r"slobench report .* recovers the rows recorded"):
            read(directory)
    conclude(directory, None, None, page_cache)
    rows = store.read_run(directory).request_rows
    assert rows["status"][1::2].tolist() == [Status.http_error] * 30
    assert (rows["status"][::2] == run.request_rows["status"][::2]).all()
    assert not (directory / "parts").exists()


@pytest.mark.faults
def test_60_bit_flips_of_rows_as_received_are_errors_that_name_the_file(killed, page_cache):
    _, directory = killed
    rng = random.Random(31)
    for file in sorted((directory / "parts").glob("shard-1-*")):
        whole = file.read_bytes()
        for _ in range(20):
            flip(file, rng.randrange(8 * len(whole)))
            with pytest.raises(RunInvalid, match=file.stem):
                conclude(directory, None, None, page_cache)
            file.write_bytes(whole)
    conclude(directory, None, None, page_cache)
    assert len(store.read_run(directory).request_rows) == 60


@pytest.mark.faults
def test_rows_of_a_run_without_any_decoded_part_are_recovered(killed, page_cache):
    _, directory = killed
    (directory / "parts" / "shard-0.npz").unlink()
    conclude(directory, None, None, page_cache)
    rows = store.read_run(directory).request_rows
    assert rows["status"].tolist() == [Status.lost, Status.http_error] * 30


@pytest.mark.faults
def test_a_report_waits_for_workers_that_still_write_and_does_not_touch_their_files(
    killed, page_cache, monkeypatch
):
    _, directory = killed
    parts = directory / "parts"
    before = {path.name: path.read_bytes() for path in parts.iterdir()}
    code = (
        "import sys; from pathlib import Path; from loadgen.archive.part_decoder import *;"
        "mark_as_written(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", code, parts], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    monkeypatch.setattr("loadgen.run.conclude._WRITERS_S", 0.0)
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"\n"
    try:
        with pytest.raises(UsageError, match="workers of this run still write their rows"):
            conclude(directory, None, None, page_cache)
        assert {path.name: path.read_bytes() for path in parts.iterdir()} == before
    finally:
        worker.kill()
        worker.communicate()
    conclude(directory, None, None, page_cache)
    assert len(store.read_run(directory).request_rows) == 60
