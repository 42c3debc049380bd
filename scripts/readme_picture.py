"""Makes docs/capacity.png, the picture of the README: verdict and curve of a capacity search.

    python scripts/readme_picture.py [--budget 6m] [--report FILE] [--to FILE]

Starts the bundled engine as a server (steps of an 8b model on an H200 that only take time, so that
no GPU is needed), runs the README's command against it, opens the report in the machine's Chromium
and stores the part from the verdict to the first figure. `--report` takes the page of a search that
exists.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
MOST_BYTES = 150_000
WIDTH = 860  # CSS pixels: the page has one column there
SLOBENCH = (sys.executable, "-m", "loadgen")
SERVER = ("serve", "--device", "sim", "--shape", "8b", "--max-num-seqs", "16", "--port", "0")
SEARCH = (
    "--input-len",
    "512",
    "--output-len",
    "128",
    "--slo",
    "p99(ttft)<500ms",
    "--precision",
    "15%",
)


@contextmanager
def server(words: Sequence[str] = SERVER) -> Iterator[str]:
    """The URL of the bundled engine, which runs until the block ends."""
    process = subprocess.Popen([*SLOBENCH, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        ready = next((line for line in process.stdout if line.startswith("READY ")), "")
        if not ready:
            raise SystemExit(f"the server ended with exit code {process.wait()}")
        yield ready.split()[1]
    finally:
        process.terminate()
        process.wait()


def search(url: str, budget: str, directory: Path) -> Path:
    """Searches the capacity of a server and returns the page."""
    command = [*SLOBENCH, "capacity", "--target", url, *SEARCH, "--budget", budget]
    subprocess.run([*command, "--out", str(directory)], cwd=ROOT, check=True)
    return directory / "report.html"


def picture(report: Path, to: Path) -> None:
    """Stores the page of a capacity search from its verdict to its first figure as PNG."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("there is no chromium or google-chrome on this machine")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": WIDTH, "height": 900}, device_scale_factor=1.5, color_scheme="light"
        )
        page.goto(report.absolute().as_uri())
        page.wait_for_selector("#attainment svg")
        page.add_style_tag(content="#attainment summary { visibility: hidden }")  # the menu
        top = page.locator(".banner").bounding_box()
        bottom = page.locator("figure:has(#attainment)").bounding_box()
        assert top is not None
        assert bottom is not None
        height = bottom["y"] + bottom["height"] - top["y"] + 16
        clip = {"x": 0.0, "y": top["y"] - 8, "width": float(WIDTH), "height": height}
        page.screenshot(path=to, clip=clip, full_page=True)  # type: ignore[arg-type]
        browser.close()
    if (size := to.stat().st_size) > MOST_BYTES:
        raise SystemExit(f"{to}: {size} bytes; at most {MOST_BYTES}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="6m", help="time of the search")
    parser.add_argument("--report", type=Path, help="the page of a search that exists")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "capacity.png")
    options = parser.parse_args()
    if options.report:
        picture(options.report, options.to)
        return
    with tempfile.TemporaryDirectory() as folder, server() as url:
        picture(search(url, options.budget, Path(folder) / "search"), options.to)


if __name__ == "__main__":
    main()
