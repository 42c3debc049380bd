"""The baseline keeps what it is given, refuses what it was not, and moves only when told to."""

import json
from dataclasses import replace

import numpy as np
import pytest
from rig import nights

from loadgen.errors import UsageError
from loadgen.run.run_options import RunOptions
from loadgen.studies.cells.cell import Cell
from loadgen.studies.nightly.baseline import Baseline
from loadgen.studies.nightly.matrix import NightCell
from loadgen.workload.scenario import load_scenario


def cell_of(**agrees):
    cell = Cell("chat", load_scenario("nightly_small"), "sim", RunOptions())
    return NightCell(cell, {"kind": "sim", "shape": "8b", **agrees})


CELL = cell_of()


def kept(store, *verdicts, cell=CELL):
    rng = np.random.default_rng(1)
    found = [replace(nights.cell_night(rng, k, 3), verdict=word) for k, word in enumerate(verdicts)]
    for night in found:
        store.add(cell, night)
    return found


def taken(store, window=14):
    return [[int(n.night[4:8]) for n in level] for level in store.history(CELL, window).levels]


def test_nights_read_back_in_their_order(tmp_path):
    store = Baseline(tmp_path / "nowhere" / "yet")
    assert store.nights(CELL) == []
    assert store.history(CELL, 14).baseline == ()
    assert store.nights(CELL) == []
    found = kept(store, "baseline", "same", "worse")
    assert store.nights(CELL) == found
    hidden = [p for p in store.root.rglob("*") if p.name.startswith(".")]
    assert hidden == []


def test_better_and_worse_nights_wait(tmp_path):
    store = Baseline(tmp_path)
    kept(store, "baseline", "same", "worse", "inconclusive", "better", "invalid", "same")
    assert taken(store) == [[0, 1, 3, 6]]
    assert taken(store, window=2) == [[3, 6]]
    night = store.nights(CELL)[3]
    assert [n.night for n in store.history(CELL, 9, before=night.night).baseline] == [
        n.night for n in store.nights(CELL)[:2]
    ]


def test_what_is_accepted_begins_a_new_level(tmp_path):
    store = Baseline(tmp_path)
    kept(store, "baseline", "same", "better", "worse", "worse")
    assert [name[4:8] for name in store.accept(CELL, "2026-01-01")] == ["0003", "0004"]
    assert taken(store) == [[0, 1], [3, 4]]
    assert store.accept(CELL, "2026-01-01") == []
    kept(store, *["baseline", "same", "better", "worse", "worse", "same", "better"])
    assert taken(store) == [[0, 1], [3, 4, 5]]
    assert [name[4:8] for name in store.accept(CELL, "2026-01-01")] == ["0006"]
    assert taken(store) == [[0, 1], [3, 4, 5], [6]]


def test_nothing_is_accepted_where_the_last_night_is_in_the_baseline(tmp_path):
    store = Baseline(tmp_path)
    kept(store, "baseline", "worse", "same")
    assert store.accept(CELL, "2026-01-01") == []


def test_old_nights_go_but_none_of_the_baseline(tmp_path):
    store = Baseline(tmp_path)
    kept(store, "baseline", "same", "worse", "worse", "worse")
    assert [name[4:8] for name in store.prune(CELL, keep=2, window=2)] == ["0002"]
    assert taken(store) == [[0, 1]]


def spoil_text(path):
    path.write_text(path.read_text()[:-40])


def spoil_number(path):
    path.write_text(path.read_text().replace('"n_due": 400', '"n_due": 401', 1))


def spoil_schema(path):
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2', 1))


def spoil_kind(path):
    path.write_text(json.dumps({"kind": "run"}))


def spoil_name(path):
    path.rename(path.with_name("20990101T000000.json"))


def spoil_bytes(path):
    path.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_text, "it is damaged"),
        (spoil_number, "its content does not match its SHA-256"),
        (spoil_schema, "it has schema 2; this version reads 1"),
        (spoil_kind, "it is not a night file of slobench"),
        (spoil_name, "its content is night 20260001T"),
        (spoil_bytes, "it is damaged"),
    ],
)
def test_a_damaged_night_is_refused_by_its_name(tmp_path, spoil, reason):
    store = Baseline(tmp_path)
    kept(store, "baseline", "same")
    path = sorted(store.folder(CELL).glob("nights/*.json"))[1]
    spoil(path)
    with pytest.raises(UsageError, match=reason) as refused:
        store.history(CELL, 14)
    assert str(path.parent) in str(refused.value)


def test_nights_of_another_cell_are_refused(tmp_path):
    store, other = Baseline(tmp_path), cell_of(shape="70b")
    kept(store, "baseline")
    kept(store, "baseline", cell=other)
    assert store.relatives(CELL).keys() == {store.folder(other).name}
    (theirs,) = store.folder(other).glob("nights/*.json")
    (ours,) = store.folder(CELL).glob("nights/*.json")
    ours.write_bytes(theirs.read_bytes())
    with pytest.raises(UsageError, match=f"its key is {other.key}, not {CELL.key}"):
        store.nights(CELL)
    (store.folder(CELL) / "key.json").write_bytes(
        (store.folder(other) / "key.json").read_bytes()
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"key\.json: it belongs to another cell"):
        store.nights(CELL)


def test_a_store_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        kept(Baseline(tmp_path / "file"), "baseline")
