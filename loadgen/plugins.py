"""Python files of the user's that register kinds (`--plugin FILE.py`)."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path

from loadgen.errors import UsageError


def load_plugin(path: Path) -> None:
    """Run a file once, under a module name of its own, so that its classes can be pickled to other
    processes that load it too. Raises UsageError if it is not there or fails."""
    name = f"slobench_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"--plugin {path}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # somebody else's code: whatever it raises is told, with its place
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise UsageError(
            f"--plugin {path}: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        ) from error
