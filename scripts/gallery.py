"""Makes every kind of page with the simulator: `python scripts/gallery.py [FOLDER]`.

Next to each page lies a text file with the command that made it and, where Chromium is in PATH, a
thumbnail of its first screen.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIM = "--target sim --engine shape=tiny,hardware=cpu"
NIGHTLY = """schema: 1
targets: [sim]
scenarios: [quickstart]
engine: shape=tiny,hardware=cpu
repeats: 3
"""
SHORT = "--set phases.warmup=0s --set phases.measure=10s"
COMMANDS: dict[str, tuple[str, str]] = {
    "run-met": (f"run quickstart {SIM} --out met", "met/report.html"),
    "run-missed": (
        f"run quickstart {SIM} --slo 'p99(ttft)<=1ms' --out missed",
        "missed/report.html",
    ),
    "run-inconclusive": (
        f"run quickstart {SIM} {SHORT} --confidence 99.9% --out open",
        "open/report.html",
    ),
    "run-invalid": (
        "run --target sim --engine shape=tiny,hardware=h200 --users 4 --input-len 8 --output-len 1 "
        "--duration 2s --slo 'p99(ttft)<=1s' --out invalid",
        "invalid/report.html",
    ),
    "run-overloaded": (
        f"run quickstart {SIM} {SHORT} --rate 400/s --out overloaded",
        "overloaded/report.html",
    ),
    "run-with-classes": (f"run mixed_classes {SIM} {SHORT} --out classes", "classes/report.html"),
    "run-of-another-mode": (
        f"run quickstart {SIM},mode=static --out static",
        "static/report.html",
    ),
    "compare": ("compare met static --vary target --html compare.html", "compare.html"),
    "capacity": (f"capacity quickstart {SIM} --budget 5m --out capacity", "capacity/report.html"),
    "sweep": (f"sweep quickstart {SIM} --over rate=4,16,64/s --out sweep", "sweep/report.html"),
    "modes": ("modes quickstart --out modes", "modes/modes.html"),
    "nightly": ("nightly nightly.yaml --out night", "night/index.html"),
    "preview": ("preview chat_bursty --html preview.html", "preview.html"),
}
VERDICTS = (0, 1, 3)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "gallery").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.stderr.write(f"no thumbnails: none of {', '.join(BROWSERS)} is in PATH\n")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / "nightly.yaml").write_text(NIGHTLY)
        for page, (command, made) in COMMANDS.items():
            done = subprocess.run(
                [sys.executable, "-P", "-m", "loadgen", *shlex.split(command)],
                cwd=work,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode not in VERDICTS or not (work / made).is_file():
                raise SystemExit(f"slobench {command}: exit {done.returncode}\n{done.stderr}")
            shutil.copy(work / made, folder / f"{page}.html")
            (folder / f"{page}.txt").write_text(f"slobench {command}\n")
            if browser is not None:
                thumbnail(browser, folder / f"{page}.html", work)


def thumbnail(browser: str, page: Path, work: Path) -> None:
    """Writes the first screen of a page beside it, as a PNG of 1 280 x 860 pixels."""
    picture = page.with_suffix(".png")
    flags = [
        "--headless",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
        "--disable-background-networking",
        "--window-size=1280,860",
        "--virtual-time-budget=10000",
        f"--user-data-dir={work / 'browser'}",
        f"--screenshot={picture}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ]
    done = subprocess.run(
        [browser, *flags, page.as_uri()], capture_output=True, text=True, check=False, timeout=120
    )
    if done.returncode or not picture.is_file():
        raise SystemExit(f"{browser}: no picture of {page}\n{done.stderr}")


if __name__ == "__main__":
    main()
