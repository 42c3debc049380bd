"""A written page as one picture or one PDF, through a Chromium that is installed; its figures as
SVG files, without one."""

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

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_WIDTH_PX, _MOST_PX = 1280, 16_000  # Chromium draws no higher picture
_DRAWING_MS = 30_000  # of the page's own time, which passes as fast as it has nothing to do
_TIMEOUT_S = 180.0
_HEIGHT = re.compile(r'<html[^>]*\bdata-height="(\d+)"')
_FIGURES = re.compile(r'<script type="application/json" id="figures">(.*?)</script>', re.DOTALL)


def find_browser(search_path: str) -> str:
    """The first Chromium or Chrome in a PATH. Raises MissingDependency, saying what to install."""
    for name in BROWSERS:
        found = shutil.which(name, path=search_path)
        if found is not None:
            return found
    raise MissingDependency(
        f"pictures and PDFs of a page need a browser, and none of {', '.join(BROWSERS)} is in PATH:"
        " install Chromium (e.g. apt-get install chromium), or ask for --svg, which needs none"
    )


def picture(page: Path, into: Path, browser: str) -> int:
    """The page as a PNG, as wide as a desk's screen: how many px at its foot are not on it, as a
    picture holds 16 000. Raises UsageError where that fails."""
    told = _chromium(browser, page, "--dump-dom", f"--window-size={_WIDTH_PX},900")
    height = _HEIGHT.search(told)
    if height is None:
        raise UsageError(f"{page}: its figures were not drawn; was it written by this version?")
    height_px = int(height[1])
    size = f"--window-size={_WIDTH_PX},{min(height_px + 1, _MOST_PX)}"
    _write(browser, page, into, f"--screenshot={into.absolute()}", size)
    return max(0, height_px - _MOST_PX)


def pdf(page: Path, into: Path, browser: str) -> None:
    """The page as it would be printed. Raises UsageError where that fails."""
    flag = f"--print-to-pdf={into.absolute()}"
    _write(browser, page, into, flag, "--no-pdf-header-footer")


def figures_of(page: Path) -> dict[str, Any]:
    """The specifications inside a page, by name, with sizes that need no page around them."""
    found = _FIGURES.search(page.read_text(encoding="utf-8"))
    if found is None:
        raise UsageError(f"{page}: holds no figures; it is no page of slobench")
    return {name: _sized(spec) for name, spec in json.loads(found[1]).items()}


def write_figures(page: Path, folder: Path) -> list[Path]:
    """Each figure of a page as an SVG of its own."""
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
    """What a headless browser prints; it has a profile of its own, and no network to speak of."""
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
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # it refuses root otherwise
            *flags,
            page.absolute().as_uri(),
        ]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"{browser}: {error}") from None
    if ended.returncode:
        last = ended.stderr.strip().splitlines()[-1:] or ["it did not say why"]
        raise UsageError(f"{browser}: exit status {ended.returncode}: {last[0]}")
    return ended.stdout


def _write(browser: str, page: Path, into: Path, *flags: str) -> None:
    """What stood there is gone first: a browser may end well and have written nothing."""
    try:
        into.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{into}: cannot be replaced: {error.strerror}") from None
    _chromium(browser, page, *flags)
    if not into.is_file() or not into.stat().st_size:
        raise UsageError(f"{into}: the browser wrote nothing there")


_FONT = "Helvetica, Arial, sans-serif"  # system-ui is a browser's word


def write_figure(spec: Mapping[str, Any], path: Path) -> None:
    """Draw a figure of fixed size into `path`, by its suffix `.svg` or `.pdf`."""
    import vl_convert

    config = {**spec.get("config", {}), "font": _FONT}
    printed = {**spec, "config": config, "background": "white"}
    if path.suffix == ".svg":
        path.write_text(vl_convert.vegalite_to_svg(printed), encoding="utf-8")
    else:
        assert path.suffix == ".pdf", f"{path}: figures are written as .svg or .pdf"
        path.write_bytes(vl_convert.vegalite_to_pdf(printed))
