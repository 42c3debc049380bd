"""The build fetches the plotting library by npm, or requires vl-convert-python instead."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BACKEND = ROOT / "scripts" / "build_backend.py"
ISC = "Permission to use, copy, modify is hereby granted."


@pytest.fixture
def backend(tmp_path):
    """The module, with files of its own instead of those of the checkout."""
    spec = importlib.util.spec_from_file_location("build_backend", BACKEND)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SCRIPT = tmp_path / "vega.js"
    module.LICENSES = tmp_path / "vega-licenses.txt"
    module.REQUIREMENTS = tmp_path / "build" / "requirements.txt"
    return module


@pytest.fixture
def packages(tmp_path):
    """A node_modules directory: three libraries, two of their dependencies, a command line."""
    folder = tmp_path / "node_modules"
    add(folder, "vega", "BSD clauses.", "2015-2023, University of Washington", ["d3-array"])
    add(folder, "vega-lite", "BSD clauses.", "2015, University of Washington", ["yargs"])
    add(folder, "vega-embed", "BSD clauses.", "2015, University of Washington", ["d3-path"])
    add(folder, "d3-array", ISC, "2010-2023 Mike Bostock")
    add(folder, "d3-path", ISC, "2015-2022 Mike Bostock")
    add(folder, "yargs", "MIT terms.", "2010 James Halliday")
    return folder


def add(folder, name, terms, holder, needs=()):
    package = folder / name
    (package / "build").mkdir(parents=True)
    about = {"name": name, "version": "1.2.3", "dependencies": dict.fromkeys(needs, "^1.0.0")}
    (package / "package.json").write_text(json.dumps(about))
    (package / "LICENSE").write_text(f"Copyright (c) {holder}\n\n{terms}\n")
    built = f'var {name.replace("-", "_")} = "{name}";\n//# sourceMappingURL={name}.min.js.map\n'
    (package / "build" / f"{name}.min.js").write_text(built)


def test_each_licence_text_stands_once_below_its_packages_and_holders(backend, packages):
    text = backend.licenses(packages)
    assert text.count(ISC) == 1
    assert text.count("BSD clauses.") == 1
    assert "d3-array: Copyright (c) 2010-2023 Mike Bostock\n" in text
    assert "d3-path: Copyright (c) 2015-2022 Mike Bostock\n" in text
    assert "vega: Copyright (c) 2015-2023, University of Washington\n" in text
    assert "MIT terms." not in text  # of a command line, which browsers do not load


def test_a_package_without_a_licence_text_ends_the_build(backend, packages):
    (packages / "d3-path" / "LICENSE").unlink()
    with pytest.raises(AssertionError, match="d3-path has no licence text"):
        backend.licenses(packages)


def test_the_script_has_versions_licences_and_the_libraries_in_order(backend, packages):
    script = backend.bundle(packages, "made from sha256 abc", backend.licenses(packages))
    first = script.splitlines()[0]
    assert first == "/* vega 1.2.3, vega-lite 1.2.3, vega-embed 1.2.3; made from sha256 abc */"
    assert ISC in script
    assert "sourceMappingURL" not in script
    places = [script.index(f'= "{name}"') for name in ("vega", "vega-lite", "vega-embed")]
    assert places == sorted(places)


def test_a_script_that_would_end_its_element_ends_the_build(backend, packages):
    (packages / "vega" / "build" / "vega.min.js").write_text('document.write("</SCRIPT>")')
    with pytest.raises(AssertionError, match="</script would end"):
        backend.bundle(packages, "mark", "terms\n")


def test_without_npm_the_build_requires_vl_convert_and_prints_that(
    backend, tmp_path, monkeypatch, capsys
):
    backend.SCRIPT.write_text("/* of another lock file */\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    backend.prepare()
    assert not backend.SCRIPT.exists()
    assert backend.LICENSES.is_file()  # named by pyproject.toml
    assert backend.REQUIREMENTS.read_text() == "vl-convert-python>=1.7,<2\n"
    printed = capsys.readouterr().err
    assert "npm is not in PATH" in printed
    assert "vl-convert-python, now a dependency" in printed


@pytest.mark.parametrize(
    ("error", "raises"),
    [("npm error code ENOTFOUND", "CannotFetch"), ("npm error code EINTEGRITY", "RuntimeError")],
)
def test_only_a_wrong_hash_ends_the_build(backend, tmp_path, monkeypatch, error, raises):
    npm = tmp_path / "npm"
    npm.write_text(f"#!/bin/sh\necho '{error}' >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    kind = RuntimeError if raises == "RuntimeError" else backend.CannotFetch
    with pytest.raises(kind, match=error.split()[-1]):
        backend.fetch(tmp_path)


def test_a_script_of_the_same_lock_file_is_kept(backend, packages, monkeypatch, tmp_path):
    monkeypatch.setattr(backend, "fetch", lambda folder: packages)
    backend.prepare()
    written = backend.SCRIPT.read_text()
    monkeypatch.setenv("PATH", str(tmp_path))
    backend.prepare()
    assert backend.SCRIPT.read_text() == written
    assert backend.REQUIREMENTS.read_text() == ""


def test_the_lock_file_pins_every_package_by_hash_and_names_no_registry():
    text = (ROOT / "scripts" / "vega" / "package-lock.json").read_text()
    locked = json.loads(text)["packages"]
    wanted = json.loads((ROOT / "scripts" / "vega" / "package.json").read_text())["dependencies"]
    assert locked.pop("")["dependencies"] == wanted
    assert all(entry["integrity"].startswith("sha512-") for entry in locked.values())
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert "resolved" not in text
    assert not re.search("regis" + r"try\.|\.tgz", text)


def test_the_fallback_is_the_extra_figures(backend):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["figures"] == [backend.FALLBACK]
