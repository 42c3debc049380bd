"""A page as a picture or a PDF, drawn by an installed Chromium; figures as SVG or PDF files, drawn
without a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgen.errors import MissingDependency, UsageError
from loadgen.system.whole_file import replacing

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_WIDTH_PX, _MOST_PX = 1280, 16_000  # Chromium draws no higher picture
_DRAWING_MS = 30_000  # virtual time: it passes as fast as the page is idle
_TIMEOUT_S = 180.0
_HEIGHT = re.compile(r'<html[^>]*\bdata-height="(\d+)"')
_FIGURES = re.compile(r'<script type="application/json" id="figures">(.*?)</script>', re.DOTALL)


def find_browser(search_path: str) -> str:
    """The first Chromium or Chrome in a PATH. Raises MissingDependency."""
    for name in BROWSERS:
        browser = shutil.which(name, path=search_path)
        if browser is not None:
            return browser
    raise MissingDependency(
        f"pictures and PDFs of a page need a browser, and none of {', '.join(BROWSERS)} is in PATH:"
        " install Chromium (e.g. apt-get install chromium), or use --svg, which needs no browser"
    )


def picture(page: Path, into: Path, browser: str) -> int:
    """Write the page as a PNG of 1280 px width. Returns the px cut off at the foot of the page: a
    picture is at most 16 000 px high. Raises UsageError if that fails."""
    dom = _chromium(browser, page, "--dump-dom", f"--window-size={_WIDTH_PX},900")
    height = _HEIGHT.search(dom)
    if height is None:
        raise UsageError(
            f"{page}: its figures were not drawn; was the page written by this version of slobench?"
        )
    height_px = int(height[1])
    size = f"--window-size={_WIDTH_PX},{min(height_px + 1, _MOST_PX)}"
    _write(browser, page, into, f"--screenshot={into.absolute()}", size)
    return max(0, height_px - _MOST_PX)


def pdf(page: Path, into: Path, browser: str) -> None:
    """Write the page as it would be printed. Raises UsageError if that fails."""
    flag = f"--print-to-pdf={into.absolute()}"
    _write(browser, page, into, flag, "--no-pdf-header-footer")


def figures_of(page: Path) -> dict[str, Any]:
    """The figures of a page by name, with fixed sizes instead of those of the page."""
    script = _FIGURES.search(page.read_text(encoding="utf-8"))
    if script is None:
        raise UsageError(f"{page}: has no figures; it is not a page of slobench")
    return {name: _sized(spec) for name, spec in json.loads(script[1]).items()}


def write_figures(page: Path, folder: Path) -> list[Path]:
    """Write each figure of a page as an SVG file."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, spec in figures_of(page).items():
        written.append(folder / f"{name}.svg")
        write_figure(spec, written[-1])
    return written


def _sized(spec: Mapping[str, Any]) -> dict[str, Any]:
    if "vconcat" in spec:
        return {**spec, "vconcat": [{**panel, "width": 900} for panel in spec["vconcat"]]}
    return {**spec, "width": 600} if spec.get("width") == "container" else dict(spec)


def _chromium(browser: str, page: Path, *flags: str) -> str:
    """Standard output of a headless browser with its own profile, without background traffic."""
    with tempfile.TemporaryDirectory(prefix="slobench-chromium-") as profile:
        command = [
            browser,
            "--headless",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={profile}",
            f"--virtual-time-budget={_DRAWING_MS}",
            *(
                ["--no-sandbox"] if os.geteuid() == 0 else []
            ),  # Chromium refuses to run as root otherwise
            *flags,
            f"{page.absolute().as_uri()}#unfolded",
        ]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"{browser}: {error}") from None
    if ended.returncode:
        last = ended.stderr.strip().splitlines()[-1:] or ["no message"]
        raise UsageError(f"{browser}: exit status {ended.returncode}: {last[0]}")
    return ended.stdout


def _write(browser: str, page: Path, into: Path, *flags: str) -> None:
    """Remove the old file first: a browser may exit with status 0 and write nothing."""
    try:
        into.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{into}: cannot be replaced: {error.strerror}") from None
    _chromium(browser, page, *flags)
    if not into.is_file() or not into.stat().st_size:
        raise UsageError(f"{into}: the browser wrote no file")


_FONT = "Helvetica, Arial, sans-serif"  # only browsers resolve system-ui


def write_figure(spec: Mapping[str, Any], path: Path) -> None:
    """Write a figure of fixed size to `path`, as SVG or PDF by its suffix. Raises
    MissingDependency."""
    try:
        import vl_convert
    except ImportError:
        raise MissingDependency(
            "SVG and PDF files of figures need vl-convert-python: pip install 'slobench[figures]';"
            " --png and --pdf print the whole page with an installed Chromium instead"
        ) from None

    config = {**spec.get("config", {}), "font": _FONT}
    printed = {**spec, "config": config, "background": "white"}
    assert path.suffix in (".svg", ".pdf"), f"{path}: figures are written as .svg or .pdf"
    with replacing(path) as partial:
        if path.suffix == ".svg":
            partial.write_text(vl_convert.vegalite_to_svg(printed), encoding="utf-8")
        else:
            partial.write_bytes(vl_convert.vegalite_to_pdf(printed))
