"""The plotting library's JavaScript, read from the installed package; none of it is copied here.

vl-convert-python carries Vega, Vega-Lite and Vega-Embed and bundles them into one script. That
takes seconds, so the result is kept in a cache directory, named after the package's version.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

_SNIPPET = "window.vegaEmbed = vegaEmbed;"
_END = "\n/* slobench: end of bundle */\n"


def made_by_vl_convert() -> str:
    """The script that defines `window.vegaEmbed`, bundled anew."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle(_SNIPPET)
    assert "</script" not in bundle.lower(), "the bundle would end its own <script> element"
    assert "<!--" not in bundle, "the bundle would open a comment in its <script> element"
    return bundle


def vega_bundle(cache_dir: Path | None = None, make: Callable[[], str] = made_by_vl_convert) -> str:
    """The script that defines `window.vegaEmbed`; about 0.9 MB, safe inside a `<script>` element.

    `cache_dir` (e.g. ~/.cache) gets `slobench/vega-<version>.js`; None, or a directory that cannot
    be written, means that the bundle is made anew.
    """
    if cache_dir is None:
        return make() + _END
    path = cache_dir / "slobench" / f"vega-{version('vl-convert-python')}.js"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        cached = path.read_text(encoding="utf-8")
        if cached.endswith(_END):
            return cached
    bundle = make() + _END
    with contextlib.suppress(OSError):
        _write_at_once(path, bundle)
    return bundle


def _write_at_once(path: Path, text: str) -> None:
    """So that nobody ever reads half a file: written beside it, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
