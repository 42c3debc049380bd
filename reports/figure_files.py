"""Figures as files for papers and slides: a Vega-Lite specification in, SVG or PDF out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
