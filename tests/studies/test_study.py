"""The plumbing of studies: directory, lock, resume, result file."""

import io
import json
import math
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import typer
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from loadgen.archive import checksums
from loadgen.cli.app import app
from loadgen.errors import RunInvalid, UsageError
from loadgen.manifest.json_section import JsonSection, NumberOrNull
from loadgen.studies.calibrate.black_box import CALIBRATE
from loadgen.studies.capacity.files import CAPACITY
from loadgen.studies.compare.run import COMPARE
from loadgen.studies.demo.run import DEMO
from loadgen.studies.doctor.run import DOCTOR
from loadgen.studies.modes.run import MODES
from loadgen.studies.nightly.files import NIGHTLY
from loadgen.studies.size.run import SIZE
from loadgen.studies.solve.run import SOLVE
from loadgen.studies.study import Study, check_store, end
from loadgen.studies.sweep.run import SWEEP


class Sums(JsonSection, frozen=True, kw_only=True):
    total: float
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    share: NumberOrNull


class Shares(JsonSection, frozen=True, kw_only=True):
    parts: dict[str, Part]
    rest: NumberOrNull | None = None


SUMS = Study("sums", "sum of parts", Sums)
OTHER = Study("other", "other study", Sums)
CELLS = Study("cells", "study of cells", Sums, before=("cell.json", "cells.json"))
SHARES = Study("shares", "shares", Shares)
STUDIES = [CALIBRATE, CAPACITY, COMPARE, DEMO, DOCTOR, MODES, NIGHTLY, SIZE, SOLVE, SWEEP]


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def started(out, **more):
    """A study with a result and a file of its own."""
    with SUMS.opened("few", out, **more) as place:
        place.write_text("part-1.txt", "1")
        place.write(Sums(total=1.0, parts=(1,)))
    return place


def failed(out, work, study=SUMS):
    """The directory of a study that ended with an error after `work`."""
    try:
        with study.opened("few", out) as place:
            work(place)
            raise KeyError
    except KeyError:
        return place.directory


def test_a_study_without_out_gets_a_directory_with_its_name(tmp_path):
    place = started(None)
    assert place.directory.parent.name == "runs"
    assert place.directory.name.startswith("sums-few-20")
    assert json.loads((place.directory / "sums.json").read_text()) == {"total": 1.0, "parts": [1]}
    assert SUMS.read(place.directory) == Sums(total=1.0, parts=(1,))


@pytest.mark.parametrize(
    ("study", "remedy"),
    [
        (SUMS, "; add --resume to continue it, or choose another --out"),
        (replace(SUMS, resumes=False), "; choose another --out"),
    ],
)
def test_a_directory_in_use_has_the_remedy_that_its_verb_offers(tmp_path, study, remedy):
    began = started(tmp_path / "s").marker.began_utc
    with pytest.raises(UsageError) as refused, study.opened("few", tmp_path / "s"):
        pytest.fail("opened")
    holds = f"--out {tmp_path / 's'}: holds a sum of parts that began {began}"
    assert str(refused.value) == holds + remedy


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_resumes_where_its_verb_has_the_flag(study):
    printed = CliRunner().invoke(app, [study.name, "--help"], env={"COLUMNS": "200"}).output
    assert study.resumes == ("--resume" in printed)


def test_two_studies_in_the_same_second_get_two_directories():
    assert started(None).directory != started(None).directory


def test_a_study_is_continued_with_resume_only(tmp_path):
    out = tmp_path / "s"
    first = started(out, definition={"a": 1})
    with (
        pytest.raises(UsageError, match=r"holds a sum of parts that began 20.*add --resume"),
        SUMS.opened("few", out, definition={"a": 1}),
    ):
        pytest.fail("opened")
    with SUMS.opened("few", out, resume=True, definition={"a": 1}) as place:
        assert place.is_resumed
        assert place.stored() == Sums(total=1.0, parts=(1,))
        assert place.marker == first.marker


def test_resume_names_the_settings_that_differ(tmp_path):
    started(tmp_path / "s", definition={"rate": 2, "engine": ["x"]})
    with (
        pytest.raises(UsageError, match=r"other settings \(rate: 2 → 3\)"),
        SUMS.opened("few", tmp_path / "s", resume=True, definition={"rate": 3, "engine": ["x"]}),
    ):
        pytest.fail("opened")


@pytest.mark.parametrize(
    ("make", "resume", "message"),
    [
        (lambda out: None, True, "does not exist; leave out --resume"),
        (lambda out: out.mkdir(), True, "holds no sum of parts; leave out --resume"),
        (lambda out: out.touch(), False, "is not a directory"),
        (lambda out: (out.mkdir(), (out / "x").touch()), False, "holds no sum of parts"),
        (lambda out: (out.mkdir(), (out / "x").touch()), True, "holds no sum of parts"),
    ],
)
def test_a_directory_with_other_content_is_refused(tmp_path, make, resume, message):
    out = tmp_path / "s"
    make(out)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=message), SUMS.opened("few", out, resume=resume):
        pytest.fail("opened")
    assert sorted(tmp_path.rglob("*")) == before


def test_the_directory_of_another_study_is_refused(tmp_path):
    started(tmp_path / "s")
    with (
        pytest.raises(UsageError, match="holds the results of slobench sums"),
        OTHER.opened("few", tmp_path / "s", resume=True),
    ):
        pytest.fail("opened")


def test_resume_needs_a_directory():
    with pytest.raises(UsageError, match="with --out"), SUMS.opened("few", None, resume=True):
        pytest.fail("opened")


def test_a_second_process_is_refused_while_a_study_runs(tmp_path):
    with SUMS.opened("few", tmp_path / "s"):
        code = (
            "from pathlib import Path\n"
            "from tests.studies.test_study import SUMS\n"
            "from loadgen.errors import UsageError\n"
            "try:\n"
            "    with SUMS.opened('few', Path('s')): pass\n"
            "except UsageError as error: print(error)\n"
        )
        shown = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={"PYTHONPATH": ":".join(sys.path)},
        ).stdout  # fmt: skip
    assert "in use by the sum of parts few, pid" in shown


def test_nothing_is_left_of_a_study_that_did_not_begin(tmp_path):
    for out in (None, tmp_path / "s"):
        assert not failed(out, lambda place: place.write(Sums(total=0.0)), CELLS).exists()


def test_a_result_alone_is_work(tmp_path):
    with SUMS.opened("few", tmp_path / "s") as place:
        place.write(Sums(total=1.0))
    with pytest.raises(UsageError, match="add --resume"), SUMS.opened("few", tmp_path / "s"):
        pytest.fail("opened")
    assert SUMS.read(tmp_path / "s").total == 1.0


def test_a_file_that_comes_before_the_first_run_is_no_work(tmp_path):
    def work(place):
        (place.directory / "a").mkdir()
        place.write_text("a/cell.json", "{}")
        (place.directory / "b" / "logs").mkdir(parents=True)

    for out in (None, tmp_path / "s"):
        assert not failed(out, work, CELLS).exists()
    assert failed(tmp_path / "s", work).exists()


def test_logs_of_a_server_that_did_not_start_are_kept(tmp_path):
    def work(place):
        (place.directory / "servers").mkdir()
        place.write_text("servers/server.log", "out of memory")

    directory = failed(tmp_path / "s", work, CELLS)
    assert [path.name for path in directory.rglob("*")] == ["servers", "server.log"]


def test_work_stays_after_an_error(tmp_path):
    failed(tmp_path / "s", lambda place: place.write_text("part-1.txt", "1"))
    with SUMS.opened("few", tmp_path / "s", resume=True) as place:
        assert (place.directory / "part-1.txt").read_text() == "1"
        assert place.stored() is None


def test_a_study_whose_server_never_answered_begins_again_without_resume(tmp_path):
    out = tmp_path / "s"
    out.mkdir()
    for _ in range(2):
        with CELLS.opened("few", out) as place:
            place.write(Sums(total=0.0))
            (out / "servers").mkdir(exist_ok=True)
            (out / "servers" / "server.log").write_text("out of memory")
            assert not place.is_resumed


def test_a_result_of_another_form_is_named_with_its_key(tmp_path):
    place = started(tmp_path / "s")
    place.write_text("sums.json", '{"total": "much"}')
    with pytest.raises(RunInvalid, match=r'sums\.json: total: expected `?float`?, found "much"'):
        SUMS.read(place.directory)
    place.write_text("sums.json", '{"total"')
    with pytest.raises(RunInvalid, match=r"sums\.json: cannot be read"):
        SUMS.read(place.directory)
    with pytest.raises(UsageError, match="holds no result of a study of cells"):
        CELLS.read(place.directory)


@pytest.mark.faults
def test_an_edited_file_of_a_study_is_refused_with_its_name(tmp_path):
    directory = started(tmp_path / "s", definition={"rate": 2}).directory
    result, marker, listed = (directory / n for n in ("sums.json", "study.json", checksums.NAME))
    whole = {path: path.read_bytes() for path in (result, marker, listed)}

    def resumed():
        with SUMS.opened("few", directory, resume=True, definition={"rate": 2}) as place:
            return place.stored()

    def message(read):
        with pytest.raises(RunInvalid) as caught:
            read()
        assert caught.value.exit_code == 3
        for path, content in whole.items():
            path.write_bytes(content)
        return str(caught.value)

    assert resumed() == SUMS.read(directory) == Sums(total=1.0, parts=(1,))
    edits = "damaged: it does not match its line in checksums.sha256"
    for read in (resumed, lambda: SUMS.read(directory)):
        result.write_bytes(whole[result].replace(b"1.0", b"9.0"))
        assert message(read).startswith(f"{result}: {edits}")
        result.unlink()
        assert message(read).startswith(f"{result}: is missing, and checksums.sha256 lists it")
        lines = whole[listed].decode().splitlines(keepends=True)
        listed.write_text("".join(line for line in lines if "sums.json" not in line))
        assert message(read).startswith(f"{result}: has no line in checksums.sha256")
        listed.unlink()
        assert message(read).startswith(f"{listed}: is missing: without it, nothing shows that")
    marker.write_bytes(whole[marker].replace(b'"rate": 2', b'"rate": 3'))
    assert message(resumed).startswith(f"{marker}: {edits}")
    marker.write_text("{")
    assert message(resumed).startswith(f"{marker}: {edits}")
    assert resumed() == Sums(total=1.0, parts=(1,))


def test_numbers_of_numpy_are_written_as_numbers(tmp_path):
    with SUMS.opened("few", tmp_path / "s") as place:
        place.write(Sums(total=np.float64(1.5), parts=(np.int64(3),)))  # type: ignore[arg-type]  # numpy
    assert SUMS.read(tmp_path / "s") == Sums(total=1.5, parts=(3,))
    with SUMS.opened("few", tmp_path / "t") as place, pytest.raises(TypeError):
        place.write(Sums(total=object()))  # type: ignore[arg-type]  # refused


def test_a_number_that_json_lacks_is_written_as_null_and_read_as_nan(tmp_path):
    written = {"a": Part(math.nan), "b": Part(-math.inf), "c": Part(0.5), "d": Part(2)}
    with SHARES.opened("few", tmp_path / "s") as place:
        place.write(Shares(parts=written))
    path = tmp_path / "s" / "shares.json"
    content = {"parts": {"a": {"share": None}, "b": {"share": None}, "c": {"share": 0.5},
                         "d": {"share": 2}}, "rest": None}  # fmt: skip
    assert json.loads(path.read_text()) == content
    read = SHARES.read(tmp_path / "s")
    assert [str(part.share) for part in read.parts.values()] == ["nan", "nan", "0.5", "2.0"]
    assert read.rest is None
    for wrong in ("much", True):
        place.write_text(path.name, json.dumps({"parts": {"a": {"share": wrong}}}))
        with pytest.raises(RunInvalid, match=r"parts\[\.\.\.\]\.share: expected float \| null"):
            SHARES.read(tmp_path / "s")


WRITER = """
import sys
from pathlib import Path
from tests.studies.test_study import SUMS, Sums
with SUMS.opened("few", Path("s")) as place:
    place.write(Sums(total=0.0, parts=(0,) * 200_000))
    print("ready", flush=True)
    for k in range(1, 10_000):
        place.write(Sums(total=float(k), parts=(k,) * 200_000))
"""


@pytest.mark.faults
def test_a_killed_study_leaves_the_old_or_the_new_result_whole(tmp_path):
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER], stdout=subprocess.PIPE,
            env={"PYTHONPATH": ":".join(sys.path)},
        ) as process:  # fmt: skip
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        result = SUMS.read(tmp_path / "s")
        assert result.parts == (int(result.total),) * 200_000


def test_a_kill_before_or_after_any_rename_leaves_a_study_that_resumes(tmp_path, monkeypatch):
    kills, rename = [], Path.replace

    def kill():
        """The files that a `kill -9` leaves here."""
        kills.append(shutil.copytree(tmp_path / "s", tmp_path / f"kill{len(kills)}"))
        for partial in kills[-1].glob("*.partial"):
            partial.write_bytes(partial.read_bytes()[: partial.stat().st_size // 2])

    def renamed(partial, path):
        kill()
        rename(partial, path)
        kill()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", renamed)
        with SUMS.opened("few", tmp_path / "s") as place:
            for k in (1, 2):
                place.write(Sums(total=float(k), parts=(k,)))
                place.write_text("page.html", f"{k}")
    found = []
    for directory in kills:
        if (checked := check_store(directory)) is not None:
            assert checked.problems == ()
        has_begun = (directory / "study.json").is_file()
        with SUMS.opened("few", directory, resume=has_begun) as place:
            stored = place.stored()
            found.append(None if stored is None else stored.total)
            place.write(Sums(total=3.0, parts=(3,)))
        assert check_store(directory).state == "verified"
    assert found == [None] * 11 + [1.0] * 12 + [2.0] * 9


def test_an_interrupt_names_the_command_that_continues(tmp_path):
    written = io.StringIO()
    place = started(tmp_path / "s")
    place.print_interrupted(Console(file=written), "1 part done")
    place.print_interrupted(Console(file=written), "1 part done", "slobench sums")
    part_of_another = replace(place, out=tmp_path)
    part_of_another.print_interrupted(Console(file=written), "1 part done")
    where = f"--out {tmp_path / 's'} --resume continues"
    assert written.getvalue().splitlines() == [
        f"interrupted: 1 part done; the same command with {where}",
        f"interrupted: 1 part done; slobench sums {where}",
        f"interrupted: 1 part done; the same command with --out {tmp_path} --resume continues",
    ]


@pytest.mark.parametrize(
    ("as_json", "shown", "printed"),
    [
        (False, "a line " * 30, "a line " * 30 + "\n"),
        (False, Text("a line " * 30), "a \nline a"),
        (True, "a line", '"total": 1.0'),
    ],
)
def test_the_end_of_a_verb_is_the_result_then_its_files(tmp_path, capsys, as_json, shown, printed):
    with pytest.raises(typer.Exit) as ending:
        end({"total": 1.0}, lambda: shown, as_json=as_json, exit_code=3,
            files={"report": tmp_path / "report.html"})  # fmt: skip
    assert ending.value.exit_code == 3
    out, err = capsys.readouterr()
    assert printed in out
    assert err == f"report: {tmp_path / 'report.html'}\n"


def test_keys_of_a_later_version_are_skipped(tmp_path):
    place = started(tmp_path / "s")
    content = {**msgspec.to_builtins(Sums(total=2.0)), "later": 1}
    place.write_text("sums.json", json.dumps(content))
    assert SUMS.read(place.directory).total == 2.0
