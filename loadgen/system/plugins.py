"""Loading of the user's Python files that register kinds (`--plugin FILE.py`)."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from loadgen.errors import UsageError


def load_plugin(path: Path, flag: str = "--plugin") -> ModuleType:
    """Run a file once as the module `slobench_plugin_<stem>`; `flag` begins messages.

    The fixed module name lets other processes that load the same file unpickle its classes. Raises
    UsageError if the file does not exist or fails.
    """
    name = f"slobench_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"{flag} {path}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything; report it with its line
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UsageError(
            f"{flag} {path}: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        ) from error
    return module
