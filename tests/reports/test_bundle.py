"""The plotting bundle comes from the installed package and is made once."""

from pathlib import Path

from reports.page import vega_bundle


def made_before() -> str:
    raise AssertionError("the bundle was made again")


def test_the_bundle_of_the_installed_package_can_be_embedded(cache: Path) -> None:
    bundle = vega_bundle(cache)
    assert "window.vegaEmbed" in bundle
    assert "</script" not in bundle.lower()
    assert "<!--" not in bundle
    assert vega_bundle(cache, make=made_before) == bundle


def test_half_a_file_in_the_cache_is_made_anew(tmp_path: Path) -> None:
    vega_bundle(tmp_path, make=lambda: "one two")
    (kept,) = (tmp_path / "slobench").iterdir()
    assert kept.name.startswith("vega-")
    kept.write_text("one")
    assert vega_bundle(tmp_path, make=lambda: "one two").startswith("one two\n")
    assert vega_bundle(tmp_path, make=made_before) == kept.read_text("utf-8")


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a directory")
    assert vega_bundle(in_the_way, make=lambda: "made").startswith("made")
    assert in_the_way.read_text() == "not a directory"
    assert vega_bundle(None, make=lambda: "made").startswith("made")
