"""The build of slobench: setuptools', after the plotting library of the pages was fetched.

npm fetches Vega, Vega-Lite and Vega-Embed and everything in them, in the versions and with the
integrity hashes of scripts/vega/package-lock.json, from the registry that npm is configured for.
Their browser builds become reports/static/vega.js, with their licences at its beginning and in
reports/static/vega-licenses.txt. git ignores both files.

A build without npm, or without its registry, succeeds: vl-convert-python, which contains the same
three libraries, becomes a dependency instead of the extra `figures`. A package with another hash
than the lock file's ends the build.

Metadata is read from the built wheel, because its dependencies follow from the build: this module
has no prepare_metadata hooks.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "scripts" / "vega" / "package-lock.json"
SCRIPT = ROOT / "reports" / "static" / "vega.js"
LICENSES = SCRIPT.with_name("vega-licenses.txt")
REQUIREMENTS = ROOT / "build" / "vega" / "requirements.txt"  # read by pyproject.toml

FALLBACK = "vl-convert-python>=1.7,<2"
LIBRARIES = ("vega", "vega-lite", "vega-embed")  # each needs those before it
# Of the command lines of these packages, which the browser builds do not contain.
_NOT_IN_BROWSERS = {"yargs", "commander", "iconv-lite", "rw"}
_NO_LICENSES = "Vega is not in this build; vl-convert-python brings its own licences.\n"
_TIMEOUT_S = 120
_COPYRIGHT = re.compile(r"^ *copyright +(?:\(c\)|©|\d).*$", re.IGNORECASE | re.MULTILINE)


class CannotFetch(Exception):
    """npm is missing or failed; the message is the reason."""


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """The hook of PEP 517."""
    from setuptools import build_meta

    prepare()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """The hook of PEP 660."""
    from setuptools import build_meta

    prepare()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    """The hook of PEP 517. The archive has the script, so that a build from it needs no npm."""
    from setuptools import build_meta

    prepare()
    return build_meta.build_sdist(sdist_directory, config_settings)


def prepare() -> None:
    """Write the script and its licences, or remove the script and require vl-convert-python."""
    made_from = LOCK.read_bytes() + Path(__file__).read_bytes()
    mark = f"made from sha256 {hashlib.sha256(made_from).hexdigest()}"
    if _is_of(mark):
        _require(())
        return
    try:
        with tempfile.TemporaryDirectory(prefix="slobench-vega-") as folder:
            packages = fetch(Path(folder))
            terms = licenses(packages)
            script = bundle(packages, mark, terms)
    except CannotFetch as reason:
        SCRIPT.unlink(missing_ok=True)
        LICENSES.write_text(_NO_LICENSES, encoding="utf-8")
        _require((FALLBACK,))
        print(  # noqa: T201 - the output of a build
            f"slobench: Vega is not in this build ({reason}); its pages take it from"
            " vl-convert-python, now a dependency (84 MB)",
            file=sys.stderr,
        )
        return
    LICENSES.write_text(terms, encoding="utf-8")
    SCRIPT.write_text(script, encoding="utf-8")
    _require(())


def _is_of(mark: str) -> bool:
    if not SCRIPT.is_file():
        return False
    with SCRIPT.open(encoding="utf-8") as file:
        return mark in file.readline()


def _require(requirements: tuple[str, ...]) -> None:
    REQUIREMENTS.parent.mkdir(parents=True, exist_ok=True)
    REQUIREMENTS.write_text("".join(f"{line}\n" for line in requirements), encoding="utf-8")


def fetch(folder: Path) -> Path:
    """Install the locked packages into `folder` without running their scripts. Returns their
    directory. Raises CannotFetch, and RuntimeError for a package with another hash."""
    npm = shutil.which("npm")
    if npm is None:
        raise CannotFetch("npm is not in PATH")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(LOCK.with_name(name), folder)
    command = [
        npm,
        "ci",
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "--no-update-notifier",
        "--fetch-retries=1",
        "--fetch-retry-mintimeout=1000",
        "--fetch-timeout=30000",
    ]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotFetch(f"npm: {error}") from None
    if "EINTEGRITY" in done.stderr:
        raise RuntimeError(f"a package is not the package of {LOCK}:\n{done.stderr}")
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if " error " in line][:1]
        raise CannotFetch(f"npm ci: exit status {done.returncode}: {' '.join(last)}")
    return folder / "node_modules"


def bundle(packages: Path, mark: str, terms: str) -> str:
    """A script that defines `window.vegaEmbed`; its first line has the versions and `mark`."""
    versions = ", ".join(
        f"{name} {json.loads((packages / name / 'package.json').read_text())['version']}"
        for name in LIBRARIES
    )
    builds = [
        (packages / name / "build" / f"{name}.min.js").read_text(encoding="utf-8")
        for name in LIBRARIES
    ]
    parts = [
        f"/* {versions}; {mark} */",
        f"/*!\n{terms}*/",
        *(re.sub(r"^//# sourceMappingURL=.*$", "", build, flags=re.MULTILINE) for build in builds),
    ]
    script = "\n".join(parts)
    # It stands in a <script> element of each page.
    for ends in ("</script", "<!--"):
        assert ends not in script.lower(), f"{ends} would end the script in a page"
    assert "*/" not in terms, "the licences would end their comment"
    return script


def licenses(packages: Path) -> str:
    """The licence texts of all packages in the script: each text once, below the copyright lines
    and the packages that it belongs to."""
    notices: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for folder in sorted(_in_browsers(packages)):
        text = _license(folder)
        copyrights = " / ".join(line.strip() for line in _COPYRIGHT.findall(text))
        rest = re.sub(r"\n\s*\n", "\n\n", _COPYRIGHT.sub("", text)).strip()
        notices[rest][copyrights].append(folder.relative_to(packages).as_posix())
    blocks = [
        "\n".join(f"{', '.join(names)}: {line}" for line, names in owners.items()) + f"\n\n{text}\n"
        for text, owners in notices.items()
    ]
    return f"\n{'-' * 72}\n\n".join(blocks)


def _license(folder: Path) -> str:
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name.lower().startswith(("license", "licence")):
            return path.read_text(encoding="utf-8").replace("\r\n", "\n")
    raise AssertionError(f"{folder.name} has no licence text")


def _in_browsers(packages: Path) -> set[Path]:
    """The directories of the libraries and of everything that they depend on."""
    seen: set[Path] = set()
    pending = [packages / name for name in LIBRARIES]
    while pending:
        folder = pending.pop()
        if folder not in seen:
            seen.add(folder)
            pending += _dependencies(folder, packages)
    return seen


def _dependencies(folder: Path, packages: Path) -> Iterator[Path]:
    described = json.loads((folder / "package.json").read_text(encoding="utf-8"))
    for name in described.get("dependencies", {}):
        if name in _NOT_IN_BROWSERS or name.startswith("@types/"):
            continue
        nested = folder / "node_modules" / name
        yield nested if nested.is_dir() else packages / name
