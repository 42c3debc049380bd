"""Executes docs/example.ipynb and stores its outputs: `make notebook`. It measures the mock server
for five seconds."""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbclient
import nbformat

NOTEBOOK = Path(__file__).parents[1] / "docs" / "example.ipynb"


def main() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]  # has no types
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which change at every execution
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, NOTEBOOK)  # type: ignore[no-untyped-call]  # has no types


if __name__ == "__main__":
    main()
