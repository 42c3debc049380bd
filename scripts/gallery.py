"""Makes every kind of page with the simulator: `python scripts/gallery.py [FOLDER]`.

Next to each page lies a text file with the command that made it.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / "nightly.yaml").write_text(NIGHTLY)
        for page, (command, made) in COMMANDS.items():
            done = subprocess.run(
                [sys.executable, "-P", "-m", "loadgen", *shlex.split(command)],
                cwd=work, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode not in VERDICTS or not (work / made).is_file():
                raise SystemExit(f"slobench {command}: exit {done.returncode}\n{done.stderr}")
            shutil.copy(work / made, folder / f"{page}.html")
            (folder / f"{page}.txt").write_text(f"slobench {command}\n")


if __name__ == "__main__":
    main()
