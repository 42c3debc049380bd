"""Compiled templates are kept where they can be, and pages are the same without."""

from pathlib import Path

from reports.page import environment


def test_a_template_is_compiled_once_per_cache(tmp_path: Path) -> None:
    environment(tmp_path).get_template("report.html.j2")
    (kept,) = tmp_path.glob("jinja2-*/*")
    written_ns = kept.stat().st_mtime_ns
    environment(tmp_path).get_template("report.html.j2")
    assert kept.stat().st_mtime_ns == written_ns


def test_a_cache_that_can_not_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    template = environment(tmp_path / "file").get_template("report.html.j2")
    assert template.name == "report.html.j2"
