"""Files on the command line that are no files, too large, or links; outputs that cannot take the
text. Each is a mistake of the user or of the machine, never an internal error."""

import gzip
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from loadgen.archive import store
from loadgen.archive.checksums import NAME
from loadgen.errors import RunInvalid, ScenarioError, SlobenchError, TraceFileError, UsageError
from loadgen.studies.compare.sides import read_noise
from loadgen.studies.nightly.spec import load_nightly
from loadgen.system.plugins import load_plugin
from loadgen.translate import inference_perf
from loadgen.workload.lengths import LENGTHS
from loadgen.workload.scenario import load_scenario
from loadgen.workload.texts import read_text
from loadgen.workload.traces.file import load_trace, read_bytes
from loadgen.workload.traces.trace import TRACES
from loadgen.yaml_document import read_file
from reference_engine.model import hardware_file
from reference_engine.smdp.decision_table import load_table
from targets.dialer import tls_context
from targets.endpoint import load_target
from tests.runs import measured_run, rewrite_manifest, write_to

OTHERS: dict[str, Callable[[Path], object]] = {
    "noise": read_noise,
    "hardware": lambda path: hardware_file._document(path),
    "table": lambda path: load_table(str(path)),
    "inference-perf": lambda path: inference_perf.translate([f"--config_file={path}"]),
    "ca_cert": tls_context,
    "plugin": load_plugin,
}
READERS: dict[str, Callable[[Path], object]] = {
    "scenario": load_scenario,
    "target": lambda path: load_target(str(path), {}),
    "night": load_nightly,
}


@pytest.fixture
def unusual(tmp_path):
    """Path by kind."""
    fifo, folder, large = tmp_path / "fifo.yaml", tmp_path / "dir.yaml", tmp_path / "large.yaml"
    os.mkfifo(fifo)
    folder.mkdir()
    with large.open("wb") as file:
        file.truncate(100 << 20)
    zero = tmp_path / "zero.yaml"
    zero.symlink_to("/dev/zero")
    return {"a FIFO": fifo, "a directory": folder, "the limit is 4 MiB": large, "a device": zero}


@pytest.mark.faults
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["a FIFO", "a directory", "the limit is 4 MiB", "a device"])
def test_what_is_no_small_regular_file_is_refused_at_once(unusual, reader, kind):
    begin_s = time.monotonic()
    with pytest.raises(UsageError, match=kind):
        READERS[reader](unusual[kind])
    assert time.monotonic() - begin_s < 5.0


@pytest.mark.faults
@pytest.mark.parametrize("reader", OTHERS)
@pytest.mark.parametrize("kind", ["a FIFO", "a directory", "a device"])
def test_other_files_of_the_command_line_must_be_regular(unusual, reader, kind):
    begin_s = time.monotonic()
    words = "no such Python file" if reader == "plugin" else kind
    with pytest.raises(UsageError, match=words):
        OTHERS[reader](unusual[kind])
    assert time.monotonic() - begin_s < 5.0


@pytest.mark.faults
@pytest.mark.parametrize("name", ["manifest.json", "summary.json", "edges.parquet",
                                  "requests.parquet", NAME])  # fmt: skip
@pytest.mark.parametrize("kind", ["a FIFO", "a device"])
def test_a_file_of_a_run_that_is_none_is_refused_at_once(unusual, tmp_path, name, kind):
    directory = tmp_path / "run"
    write_to(directory, measured_run(n_requests=20))
    store.write_summary(directory, {})
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(unusual[kind])
    begin_s = time.monotonic()
    read = store.read_summary if name == "summary.json" else store.read_run
    with pytest.raises((UsageError, RunInvalid), match=f"{kind}|not a run directory"):
        read(directory)
    assert time.monotonic() - begin_s < 5.0


def test_the_limit_of_a_result_is_named(unusual, tmp_path):
    path = tmp_path / "noise.json"
    with path.open("wb") as file:
        file.truncate((256 << 20) + 1)
    with pytest.raises(UsageError, match=r"noise\.json: cannot be read: .*the limit is 256 MiB"):
        read_noise(path)


def test_a_folder_with_the_name_of_a_shipped_scenario_does_not_hide_it(tmp_path, monkeypatch):
    (tmp_path / "quickstart").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_scenario("quickstart").name == "quickstart"


@pytest.mark.faults
@pytest.mark.parametrize("text", ["root:$6$secret: 1\n", "root:$6$secret:*: 1:\n", "secret\n"])
@pytest.mark.parametrize("reader", READERS)
def test_the_content_behind_a_link_is_not_quoted(tmp_path, text, reader):
    (tmp_path / "private").write_text(text)
    (tmp_path / "link.yaml").symlink_to("private")
    with pytest.raises(UsageError) as refused:
        READERS[reader](tmp_path / "link.yaml")
    assert "secret" not in str(refused.value)
    assert "link.yaml" in str(refused.value)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("reader", "text"),
    [
        (load_trace, "root:$6$secret:1\nbin:secret\n"),
        (load_trace, "timestamp,input_tokens,output_tokens\nsecret,1,5\n"),
        (read_noise, '{"measures": {"p50(ttft)": {"sd": "secret", "df": 1}}}'),
    ],
)
def test_the_content_of_other_files_behind_a_link_is_not_quoted(tmp_path, reader, text):
    (tmp_path / "private").write_text(text)
    (tmp_path / "link.csv").symlink_to("private")
    for name in ("private", "link.csv"):
        with pytest.raises(SlobenchError) as refused:
            reader(tmp_path / name)
        assert name in str(refused.value)
        assert ("secret" in str(refused.value)) == (name == "private")


def test_a_link_to_a_scenario_is_read(tmp_path):
    (tmp_path / "a.yaml").write_text("schema: 1\nname: x\n")
    (tmp_path / "b.yaml").symlink_to("a.yaml")
    assert read_file(tmp_path / "b.yaml") == b"schema: 1\nname: x\n"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: [content], "expected an object, found a list"),
        (lambda content: content | {"schema": "1"}, "schema: expected 3, found '1'"),
        (lambda content: content | {"schema": 0}, "schema: expected 3, found 0"),
        (lambda content: content | {"schema": True}, "schema: expected 3, found True"),
        (lambda c: {k: v for k, v in c.items() if k != "window"}, "window: this key is missing"),
        (lambda content: content | {"slo": ["p99(ttft) <<= 5ms"]}, "p99(ttft) <<= 5ms"),
        (lambda content: content | {"slo": "p99"}, "slo: expected array"),
    ],
)
def test_a_wrong_manifest_is_no_internal_error(cli, tmp_path, change, words):
    write_to(tmp_path / "run", measured_run(n_requests=60))
    rewrite_manifest(tmp_path / "run", change)
    for verb in ("report", "rescore", "verify"):
        result = cli(verb, "run", cwd=tmp_path)
        if verb == "verify":  # compares files, and reads no SLO
            assert result.returncode in (0, 3), result.stderr
        else:
            assert result.returncode in (2, 3), (verb, result.stderr)
            assert words in result.stderr, result.stderr


@pytest.mark.faults
def test_an_ascii_terminal_gets_the_text_in_ascii(cli, tmp_path):
    write_to(tmp_path / "run", measured_run(n_requests=60, slo=["p90(ttft) <= 1s"]))
    result = cli("rescore", "run", cwd=tmp_path, environ={"PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0, result.stderr
    assert "MET" in result.stdout
    assert result.stdout.isascii()


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["a FIFO", "a directory", "a device", "the limit is 2048 MiB"])
def test_a_trace_that_is_no_file_or_too_large_is_refused_at_once(unusual, tmp_path, kind):
    sparse = tmp_path / "sparse.csv"
    with sparse.open("wb") as file:
        file.truncate(10 << 30)
    path = unusual.get(kind, sparse)
    begin_s = time.monotonic()
    with pytest.raises(TraceFileError, match=f"{path.name}: .*{kind}"):
        load_trace(path)
    with pytest.raises(ScenarioError, match=f"prompts.path: .*{kind}"):
        read_text(str(path), "prompts.path")
    assert time.monotonic() - begin_s < 5.0


@pytest.mark.faults
def test_a_packed_trace_above_the_limit_is_refused(tmp_path):
    path = tmp_path / "packed.csv.gz"
    path.write_bytes(gzip.compress(bytes((2 << 20) + 1)))
    with pytest.raises(TraceFileError, match="unpacks to more than the limit of 2 MiB"):
        read_bytes(path, most_bytes=2 << 20)


def test_a_trace_of_a_million_rows_is_accepted(tmp_path):
    path = tmp_path / "long.csv"
    rows = "".join(f"{row / 1000},{row % 900 + 1},7\n" for row in range(10**6))
    path.write_text("time,input_tokens,output_tokens\n" + rows)
    trace = load_trace(path)
    assert len(trace) == 10**6
    assert trace.input_tokens[-1] == 999_999 % 900 + 1


@pytest.mark.faults
@pytest.mark.e2e
def test_a_word_that_is_not_utf_8_is_refused_at_once(cli, tmp_path):
    name = os.fsencode(tmp_path) + b"/a\xff.yaml"
    Path(os.fsdecode(name)).write_text("schema: 1\nname: a\n")
    for verb in (b"run", b"validate", b"sweep"):
        command = [sys.executable, "-m", "loadgen", verb, name]
        ended = subprocess.run(
            command, cwd=tmp_path, env=cli.environ, capture_output=True, timeout=60
        )
        assert ended.returncode == 2, ended.stderr
        assert rb"a\udcff.yaml: is not UTF-8 text; rename the file" in ended.stderr


@pytest.mark.faults
@pytest.mark.parametrize("reader", READERS)
def test_an_escape_that_is_no_character_is_refused_with_its_line(tmp_path, reader):
    path = tmp_path / "a.yaml"
    path.write_text('schema: 1\nother: [{a: "b\\uD800"}]\n')
    with pytest.raises(UsageError, match=r"a.yaml:2: other.0.a: a surrogate"):
        READERS[reader](path)


LONG = "x" * 140_000  # Python's csv module refuses cells above 128 KiB
COLUMNS = TRACES.build(
    {"kind": "columns", "time": "time", "input_tokens": "input", "output_tokens": "output"}
)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"time,input,{LONG}\n0,10,10\n", ":1: no column 'output'"),
        (f"time,input,output,note\n0,10,10,{LONG}\n1,10,10\n", ":3: expected 4 columns, got 3"),
        (f"time,input,output,note\n0,10,10,{LONG}\n1,1e99,1,a\n", ":3: input: expected a whole"),
    ],
)
def test_a_long_cell_of_a_trace_does_not_hide_its_mistake(tmp_path, text, problem):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(TraceFileError) as refused:
        load_trace(path, COLUMNS)
    assert str(refused.value).startswith(f"{path}{problem}")


@pytest.mark.faults
def test_a_long_cell_in_another_column_is_no_mistake(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"time,input,output,note\n0,10,20,{LONG}\n1,30,40,b\n")
    assert load_trace(path, COLUMNS).output_tokens.tolist() == [20, 40]


@pytest.mark.faults
def test_a_long_cell_of_observed_lengths_is_a_mistake_of_its_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"tokens\n10\n{'1' * 140_000}\n")
    with pytest.raises(ValidationError, match=r"a.csv:3: tokens"):
        LENGTHS.build({"kind": "empirical", "path": str(path)})
