"""The table of docs/exit-codes.md, cell by cell: each code of each verb, made once.

A cell that reads like those of other verbs (a mistake, a bug, out of memory, interrupted) is made
alike for each verb, at the process boundary.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.cli import exit_codes
from loadgen.cli.app import app
from loadgen.cli.lazy_verbs import VERBS, command
from tests.archive.test_collect import keep
from tests.e2e.lenient import LENIENT
from tests.foreign.results import vllm
from tests.runs import measured_run, starved, with_manifest, write_to
from tests.studies.demo.fake_peer import fake_command
from tests.studies.nightly import few
from tests.studies.size.test_size import stored

PAGE = Path(__file__).parents[1] / "docs" / "exit-codes.md"
CODES = (0, 1, 2, 3, 4, 130)
TRAFFIC = "--rate=20/s --input-len=64 --output-len=8 --warmup=0s --duration=2s"
STEP_COSTS = """\
name: known
model: tiny
kv_tokens: 32768
costs: {step: 8ms, sequence: 0.5ms, prefill_sequence: 2ms, token: 50us, context_token: 1us}
"""
A_CLOCK = """
import time
from reference_engine.policies.prefill_first import PrefillFirst

class Timed(PrefillFirst):
    kind = "timed"
"""
ALIKE = {
    "out of memory": MemoryError(),
    "a bug": KeyError("what"),
    "interrupted": KeyboardInterrupt(),
}
"""The beginning of a cell → an exception of the verb's body that leads to its code."""


def table():
    """(verb, code) → the text of its cell; no entry for "–"."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert head == ["Verb", *map(str, CODES)]
    rows = {verb.strip("`"): cells for verb, *cells in body}
    return {
        (verb, code): text
        for verb, cells in rows.items()
        for code, text in zip(CODES, cells, strict=True)
        if text != "–"
    }


TABLE = table()


class World:
    """Command lines in a folder that has the runs and studies that the verbs read."""

    def __init__(self, folder, environ):
        self.folder, self.environ = folder, environ

    def __call__(self, line, verb_error=None):
        """The exit code of a command line, in this process."""
        words = shlex.split(line)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setattr("sys.argv", ["slobench", *words])
            for name, value in self.environ.items():
                patch.setenv(name, value)
            if verb_error is not None:
                patch.setattr(command(words[0]), "invoke", lambda _: _raise(verb_error))
            return exit_codes.guarded(lambda: app(words), self.environ)

    def start(self, line):
        """The process of a command line."""
        return subprocess.Popen(
            [sys.executable, "-m", "loadgen", *shlex.split(line)],
            cwd=self.folder, env={**os.environ, **self.environ},
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def process(self, line):
        """The exit code of a command line in a process of its own."""
        process = self.start(line)
        process.communicate(timeout=120)
        return process.returncode


def _raise(error):
    raise error


@pytest.fixture(scope="module")
def world(tmp_path_factory, page_cache):
    folder = tmp_path_factory.mktemp("world")
    world = World(folder, {"XDG_CACHE_HOME": str(page_cache.parent)})
    few.write(folder, "metrics: [p50(tpot)]\n")
    assert world(f"simulate {TRAFFIC} --slo ttft<=1s --out met") == 0
    damaged = shutil.copytree(folder / "met", folder / "damaged")
    for name in ("requests.parquet", "manifest.json"):
        (damaged / name).write_bytes((damaged / name).read_bytes()[:-9])
    rows = [f"2024-01-01 00:00:{k * 37 % 60:02}.0,{100 + k},{10 + k % 7}" for k in range(40)]
    (folder / "theirs.json").write_text(json.dumps(vllm()))
    for nights, ttfts_ms in (("quiet", (10, 11, 10, 11)), ("loud", (10, 11, 10, 90)),
                             ("new", (10, 11))):  # fmt: skip
        for number, ttft_ms in enumerate(ttfts_ms):
            (folder / nights / f"n{number}").mkdir(parents=True)
            numbers = {"mean_ttft_ms": ttft_ms, "mean_tpot_ms": 5.0, "output_throughput": 9.0}
            file = folder / nights / f"n{number}" / "bench.json"
            file.write_text(json.dumps(vllm() | numbers))
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]
    (folder / "trace.csv").write_text("\n".join(lines))
    return world


@pytest.fixture(scope="module")
def on_locust(world):
    """The exit codes of masters and of a worker, which run at the same time."""
    port = free_port()
    lenient = " ".join(f"--set={key}={value}" for key, value in LENIENT.items())
    web = f"web --headless --target=mock {TRAFFIC} {lenient}"
    lines = {
        (
            "web",
            0,
        ): f"{web} --slo=requests_per_s>=1/s --out=w0 --expect-workers=1 --master-port={port}",
        ("worker", 0): f"worker --master=127.0.0.1 --port={port}",
        ("web", 1): f"{web} --slo=requests_per_s>=500/s --out=w1",
        ("web", 3): f"{web} --slo=p99(e2e)<=60s --out=w3",
    }
    processes = {cell: world.start(line) for cell, line in lines.items()}
    for process in processes.values():
        process.communicate(timeout=200)
    return {cell: process.returncode for cell, process in processes.items()}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def served(world):
    process = world.start("serve --device=toy --port=0")
    with process:
        assert process.stdout is not None
        assert any(line.startswith("READY") for line in process.stdout)
        process.send_signal(signal.SIGTERM)
    return process.returncode


def collected(world):
    from loadgen.archive import store

    directory = world.folder / "killed"
    whole = with_manifest(measured_run(n_requests=60), run="evening", ended="running")
    whole = write_to(directory, whole)
    for name in ("requests.parquet", "chunks.parquet"):
        (directory / name).unlink()
    store.write_schedule(directory, whole)
    keep(whole, world.folder / "kept", 0)
    keep(whole, world.folder / "kept", 1)
    return world("collect killed --from kept")


def compared_with_an_invalid_side(world):
    write_to(world.folder / "good", measured_run(slo=["p50(ttft) <= 500ms"]))
    write_to(world.folder / "bad", starved(measured_run(seed=3, slo=["p50(ttft) <= 500ms"])))
    return world("compare good bad")


def night(world, line, more=""):
    (world.folder / "nightly.yaml").write_text(few.FILE + "metrics: [p50(tpot)]\n" + more)
    return world(f"nightly nightly.yaml --baseline nights {line}")


def worse_night(world):
    assert night(world, "--out night-1") == 0
    return night(world, "--out night-2 --engine step_delay=50%")


def sized_beyond_all(world):
    """A search that states a hundred times the capacity of the engine."""
    engine = "hardware=a100,shape=8b"
    stored(world.folder / "wrong", {"low": 500.0, "value": 510.0, "high": 520.0},
           {"target": "sim", "engine": engine})  # fmt: skip
    return world(
        "size capacity_search --warmup=0s --duration=2s --schedules=1 --capacity wrong "
        "--peak=400/s --headroom=0% --attainment=90% --out s1"
    )


def sized_by_an_edited_search(world):
    path = stored(world.folder / "edited") / "capacity.json"
    path.write_text(path.read_text().replace('"low": 7.1', '"low": 70.1'))
    return world("size capacity_search --capacity edited --peak=40/s --attainment=90% --out s3")


def resumed_after_an_edit(world):
    line = f"modes {TRAFFIC} --slo ttft<=1s --modes chunked --workers 1 --out m3"
    assert world(line) == 0
    path = next((world.folder / "m3" / "cells").glob("*.json"))
    path.write_text(path.read_text().replace('"verdict": "met"', '"verdict": "missed"'))
    return world(f"{line} --resume")


def with_an_edited_cell(world, line, out):
    assert world(f"{line} --out {out}") == 0
    path = next((world.folder / out / "cells").glob("*.json"))
    path.write_text(path.read_text().replace('"n_ok": ', '"n_ok": 1'))
    return world(f"{line} --out {out} --resume")


def claims_with_an_edited_cell(world):
    line = "claims --only continuous-similar --seeds 1 --workers 1"
    return with_an_edited_cell(world, line, "c3")


def tuned_with_an_edited_cell(world):
    line = f"tune {TRAFFIC} --slo ttft<=1s --modes chunked --seeds 1 --workers 1"
    return with_an_edited_cell(world, line, "t3")


def checked_policy(world):
    (world.folder / "timed.py").write_text(A_CLOCK)
    return world.process("modes --check-policy timed.py")


def step_log(world):
    """A log of the bundled engine, and one whose second half takes three times as long."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder, bad = world.folder / "log", world.folder / "bad_log"
    if folder.exists():
        return
    (world.folder / "known.yaml").write_text(STEP_COSTS)
    engine = "shape=tiny,device=sim,hardware=known.yaml,log_level=full"
    load = "--rate=10/s --input-len=200 --output-len=24 --warmup=0s --duration=4s"
    code = world.process(f"run --target=reference --engine={engine} {load} --out=log")
    assert code in (0, 3)
    bad.mkdir()
    for name in ("engine_steps.parquet", "engine_events.parquet"):
        table = pq.read_table(folder / name)
        if "end_s" in table.column_names:
            ends = table["end_s"].to_pylist()
            lengths_s = [end - begin for begin, end in zip([ends[0], *ends], ends, strict=False)]
            half = len(ends) // 2
            late_s = [sum(2 * s for s in lengths_s[half : n + 1]) for n in range(len(ends))]
            moved = pa.array([end + late for end, late in zip(ends, late_s, strict=True)])
            table = table.set_column(table.schema.get_field_index("end_s"), "end_s", moved)
        pq.write_table(table, bad / name)


def calibrated(world, line):
    step_log(world)
    return world(f"calibrate --shape=tiny {line}")


def demonstrated(world, command, result, out):
    settings = {"slobench": {"command": command, "result": result}}
    (world.folder / f"{out}.yaml").write_text(json.dumps(settings))
    return world(f"demo truth --rounds=1 --duration=1s --rate=5/s --peers={out}.yaml --out {out}")


GONE = "http://127.0.0.1:9"
SIM = f"{TRAFFIC} --target=sim"
MADE = {
    ("run", 0): f"run {SIM} --slo ttft<=1s",
    ("run", 1): f"run {SIM} --slo ttft<=1us",
    ("run", 3): f"run {SIM} --slo p99(ttft)<=1s",
    ("preview", 0): "preview quickstart",
    ("validate", 0): "validate quickstart",
    ("fit", 0): "fit trace.csv",
    ("doctor", 0): "doctor --target mock",
    ("doctor", 3): f"doctor --target {GONE}",
    # with a client of a few lines as slobench, whose own runs are INVALID on a busy machine
    ("demo", 0): lambda world: demonstrated(world, fake_command(), "result.json", "d0"),
    ("demo", 3): lambda world: demonstrated(world, "false", "none", "d3"),
    ("init", 0): "init new",
    ("report", 0): "report met",
    ("report", 3): "report damaged",
    ("export", 0): "export met --format csv",
    ("export", 3): "export damaged --format csv",
    ("judge", 0): "judge theirs.json",
    ("judge", 1): "judge theirs.json --slo p50(ttft)<=1us",
    ("judge", 3): "judge theirs.json --slo p99(ttft)<=1s",
    ("alarms", 0): "alarms quiet",
    ("alarms", 1): "alarms loud",
    ("alarms", 3): "alarms new",
    ("import", 0): "import theirs.json --out imported",
    ("verify", 0): "verify met",
    ("verify", 3): "verify damaged",
    ("rescore", 0): "rescore met",
    ("rescore", 1): "rescore met --slo ttft<=1us",
    ("rescore", 3): "rescore met --slo p99(ttft)<=1s",
    ("compare", 0): "compare met met",
    ("compare", 1): f"compare {TRAFFIC} --target=sim --target=sim --engine= "
    "--engine=step_delay=300% --repeats=2 --metric=mean(ttft) --out=worse",
    ("compare", 3): compared_with_an_invalid_side,
    ("nightly", 0): lambda world: night(world, "--out night-0"),
    ("nightly", 1): worse_night,
    ("nightly", 3): lambda world: night(
        world, "--out night-3", "control: {target: sim, engine: 'shape=nowhere'}\n"
    ),
    ("capacity", 0): "capacity --rate=4/s --input-len=200 --output-len=20 --warmup=0s "
    "--duration=3s --slo=ttft<=200ms --target=sim --engine=max_num_seqs=4 --budget=40s",
    ("capacity", 1): f"capacity {SIM} --slo ttft<=1ns --between 1/s:2/s",
    ("capacity", 3): f"capacity {SIM} --slo ttft<=100s --between 1/s:2/s",
    ("size", 0): lambda world: world(
        f"size capacity_search --capacity {stored(world.folder / 'search')} --peak=40/s "
        "--attainment=90% --out s0"
    ),
    ("size", 1): sized_beyond_all,
    ("size", 3): sized_by_an_edited_search,
    ("sweep", 0): f"sweep {SIM} --over engine.mode=chunked --repeats 1 --slo ttft<=1us --out sw",
    ("sweep", 1): f"sweep {SIM} --over engine.mode=chunked --repeats 1 --slo ttft<=1us "
    "--fail-on missed --out sw1",
    ("sweep", 3): f"sweep {SIM} --over engine.shape=nowhere --repeats 1 --out sw3",
    ("serve", 0): served,
    ("simulate", 0): f"simulate {TRAFFIC} --slo ttft<=1s",
    ("simulate", 1): f"simulate {TRAFFIC} --slo ttft<=1us",
    ("simulate", 3): f"simulate {TRAFFIC} --slo p99(ttft)<=1s",
    ("modes", 0): f"modes {TRAFFIC} --slo ttft<=1s --modes chunked --workers 1 --out m0",
    ("modes", 1): checked_policy,
    ("modes", 3): resumed_after_an_edit,
    ("calibrate", 0): lambda world: calibrated(world, "--steps log --out ok.yaml --force"),
    ("calibrate", 1): lambda world: calibrated(world, "--steps bad_log --out bad.yaml"),
    ("calibrate", 3): f"calibrate --shape=tiny --target {GONE} --out gone.yaml",
    ("solve", 0): f"solve {TRAFFIC} --hardware=h200 --load=50% --seeds=0 --out solved",
    ("tune", 0): f"tune {TRAFFIC} --slo ttft<=1s --modes chunked --seeds 1 --workers 1 --out t0",
    ("tune", 1): f"tune {TRAFFIC} --slo ttft<=1us --modes chunked --seeds 1 --workers 1 --out t1",
    ("tune", 3): tuned_with_an_edited_cell,
    ("claims", 0): "claims --only static-padding --only smdp-affine --out c0",
    ("claims", 3): claims_with_an_edited_cell,
    ("collect", 0): collected,
    ("collect", 3): "collect damaged",
    ("locustfile", 0): "locustfile",
    ("list", 0): "list arrivals",
    ("from", 0): "from 'vllm bench serve --request-rate 8 --num-prompts 80'",
}
"""Cell → a command line that makes its code, or a function that returns it."""
REQUIRED = {
    **dict.fromkeys(("fit", "report", "verify", "rescore", "nightly", "collect", "from"), "x"),
    "import": "x", "judge": "x", "alarms": "x",
    "export": "x --format=csv", "size": "--peak=1/s", "calibrate": "--shape=tiny",
    "demo": "truth", "solve": "--hardware=h200", "worker": "--master=127.0.0.1",
}  # fmt: skip
"""The words without which a verb does not start."""
ON_LOCUST = [("web", 0), ("web", 1), ("web", 3), ("worker", 0)]


def alike(cell):
    """The exception that makes a cell which reads like those of other verbs; None for others."""
    if cell in MADE:
        return None
    beginnings = re.split("; |, ", TABLE[cell])
    return next((error for text, error in ALIKE.items() if text in beginnings), None)


def ids(cells):
    return [f"{verb}-{code}" for verb, code in cells]


def test_the_table_has_every_verb_and_this_file_makes_every_cell():
    assert {verb for verb, _ in TABLE} == set(VERBS)
    mistakes = [cell for cell in TABLE if cell[1] == 2]
    by_error = [cell for cell in TABLE if alike(cell) is not None]
    assert sorted([*MADE, *ON_LOCUST, *mistakes, *by_error]) == sorted(TABLE)
    assert all((verb, code) in TABLE for verb in VERBS for code in (0, 2, 3, 4, 130))


@pytest.mark.parametrize("cell", MADE, ids=ids(MADE))
def test_a_cell_is_as_the_table_states(world, cell, capsys):
    made = MADE[cell]
    code = made(world) if callable(made) else world(made)
    assert code == cell[1], (TABLE[cell], capsys.readouterr())


@pytest.mark.timeout(240)
@pytest.mark.parametrize("cell", ON_LOCUST, ids=ids(ON_LOCUST))
def test_a_cell_of_the_verbs_on_locust_is_as_the_table_states(on_locust, cell):
    assert on_locust[cell] == cell[1], TABLE[cell]


@pytest.mark.parametrize("verb", VERBS)
def test_a_mistake_is_2(world, verb, capsys):
    assert world(f"{verb} --no-such-flag") == 2, capsys.readouterr()


BY_ERROR = [cell for cell in TABLE if cell[1] in (3, 4, 130) and alike(cell) is not None]


@pytest.mark.parametrize("cell", BY_ERROR, ids=ids(BY_ERROR))
def test_an_error_in_the_body_of_a_verb_has_the_code_of_its_kind(world, cell, capsys):
    verb, code = cell
    line = f"{verb} {REQUIRED.get(verb, '')}"
    assert world(line, alike(cell)) == code, capsys.readouterr()
