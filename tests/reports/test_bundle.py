"""The plotting script is that of the build; without, vl-convert-python makes it once."""

import sys
from functools import partial
from pathlib import Path

import pytest

from loadgen.errors import MissingDependency
from reports.page import made_by_vl_convert, vega_bundle
from reports.printed import write_figure

without_npm = partial(vega_bundle, built=lambda: None)


def made_before() -> str:
    raise AssertionError("the bundle was made again")


def test_the_script_of_the_build_is_used_and_nothing_is_cached(tmp_path: Path) -> None:
    assert vega_bundle(tmp_path, make=made_before, built=lambda: "built") == "built"
    assert list(tmp_path.iterdir()) == []


def test_vl_convert_makes_a_script_that_can_be_embedded(cache: Path, capfd) -> None:
    bundle = without_npm(cache / "anew")
    assert capfd.readouterr() == ("", "")  # of a notebook, too
    assert "window.vegaEmbed" in bundle
    assert "</script" not in bundle.lower()
    assert "<!--" not in bundle
    assert without_npm(cache / "anew", make=made_before) == bundle


def test_an_installation_without_both_names_the_extra(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(MissingDependency, match=r"pip install 'slobench\[figures\]'"):
        made_by_vl_convert()
    with pytest.raises(MissingDependency, match=r"pip install 'slobench\[figures\]'"):
        write_figure({}, tmp_path / "figure.svg")


def test_half_a_file_in_the_cache_is_made_anew(tmp_path: Path) -> None:
    without_npm(tmp_path, make=lambda: "one two")
    (kept,) = (tmp_path / "slobench").iterdir()
    assert kept.name.startswith("vega-")
    kept.write_text("one")
    assert without_npm(tmp_path, make=lambda: "one two").startswith("one two\n")
    assert without_npm(tmp_path, make=made_before) == kept.read_text("utf-8")


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a directory")
    assert without_npm(in_the_way, make=lambda: "made").startswith("made")
    assert in_the_way.read_text() == "not a directory"
    assert without_npm(None, make=lambda: "made").startswith("made")
