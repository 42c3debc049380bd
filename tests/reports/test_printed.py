"""Copies of a page for slides: a picture, a PDF, and figures as files."""

import struct

import pytest

from loadgen.cli.recorded import write_copies
from loadgen.errors import MissingDependency, UsageError
from loadgen.measure.aggregate import summarize
from reports.printed import find_browser, pdf, picture, write_figures
from reports.run.page import render
from tests.browser import CHROMIUM, needs_chromium
from tests.runs import measured_run


@pytest.fixture(scope="module")
def page(cache, tmp_path_factory):
    run = measured_run(slo=["ttft <= 1s"])
    path = tmp_path_factory.mktemp("printed") / "report.html"
    path.write_text(render(run, summarize(run), cache))
    return path


def test_without_a_browser_one_is_told_what_to_install(tmp_path):
    with pytest.raises(MissingDependency, match=r"install Chromium .* --svg"):
        find_browser(str(tmp_path))
    assert MissingDependency.exit_code == 2


def test_the_first_browser_in_the_path_is_taken(tmp_path):
    (tmp_path / "google-chrome").touch(mode=0o755)
    assert find_browser(str(tmp_path)) == str(tmp_path / "google-chrome")


def test_a_browser_that_fails_is_told_with_its_last_words(page, tmp_path):
    (tmp_path / "chromium").write_text("#!/bin/sh\necho cannot open display >&2\nexit 7\n")
    (tmp_path / "chromium").chmod(0o755)
    with pytest.raises(UsageError, match="exit status 7: cannot open display"):
        pdf(page, tmp_path / "page.pdf", str(tmp_path / "chromium"))


def fake_browser(tmp_path, height):
    """Says how high the page is, and draws as it is told: not at all, or a byte."""
    path = tmp_path / "chromium"
    path.write_text(
        f"""#!/bin/sh
echo '<html lang="en" data-height="{height}">'
for word; do case $word in --window-size=*) echo $word >> {tmp_path}/sizes;; esac; done
[ ! -e {tmp_path}/draws ] || for word; do case $word in
  --screenshot=*) printf . > "${{word#*=}}";;
esac; done
"""
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("write", [picture, pdf])
def test_an_old_copy_is_not_passed_off_as_a_new_one(write, page, tmp_path):
    (tmp_path / "copy").write_bytes(b"of an old run")
    with pytest.raises(UsageError, match="copy: the browser wrote no file"):
        write(page, tmp_path / "copy", fake_browser(tmp_path, 900))
    assert not (tmp_path / "copy").exists()


def test_a_copy_that_cannot_be_replaced_is_named(page, tmp_path):
    (tmp_path / "copy").mkdir()
    with pytest.raises(UsageError, match=r"copy: cannot be replaced: "):
        pdf(page, tmp_path / "copy", fake_browser(tmp_path, 900))


@pytest.mark.parametrize(("height", "drawn", "lost"), [(15_999, 16_000, 0), (20_000, 16_000, 4000)])
def test_a_page_higher_than_a_picture_may_be_is_said_to_be_cut(height, drawn, lost, page, tmp_path):
    (tmp_path / "draws").touch()
    assert picture(page, tmp_path / "page.png", fake_browser(tmp_path, height)) == lost
    assert (tmp_path / "sizes").read_text().split()[-1] == f"--window-size=1280,{drawn}"


def test_the_user_is_told_that_a_picture_was_cut(page, tmp_path, capsys):
    (tmp_path / "draws").touch()
    (tmp_path / "report.html").write_text(page.read_text())
    write_copies(
        tmp_path / "report.html", fake_browser(tmp_path, 20_000), png=True, pdf=False, svg=False
    )
    assert capsys.readouterr().err.splitlines() == [
        f"png: {tmp_path / 'report.png'}",
        "png: the last 4\u202f000 px of the page are missing (the size limit of a picture);"
        " --pdf holds the whole page",
    ]


def test_every_figure_is_a_file(page, tmp_path):
    written = write_figures(page, tmp_path / "figures")
    assert {path.stem for path in written} >= {"timeline", "spectrum-ttft", "slowest", "why-split"}
    assert all(path.read_text().startswith("<svg") for path in written)


def test_a_page_of_somebody_else_has_no_figures(tmp_path):
    (tmp_path / "other.html").write_text("<html></html>")
    with pytest.raises(UsageError, match="not a page of slobench"):
        write_figures(tmp_path / "other.html", tmp_path)


@pytest.mark.e2e
@needs_chromium
def test_a_picture_holds_the_whole_page(page, tmp_path):
    picture(page, tmp_path / "page.png", str(CHROMIUM))
    content = (tmp_path / "page.png").read_bytes()
    width, height = struct.unpack(">II", content[16:24])  # of the IHDR chunk
    assert content.startswith(b"\x89PNG")
    assert width == 1280
    assert height > 4000
