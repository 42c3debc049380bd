"""Pages: templates, embedded data and the plotting library in a single file that needs only a
browser.

The content security policy of a page names its own scripts by their hashes and allows nothing else,
so text from a run or a scenario cannot become code. The plotting library (Vega, Vega-Lite and
Vega-Embed as a single script) is a file of the built package, `static/vega.js`
(scripts/build_backend.py). A build without npm lacks the file; then vl-convert-python makes the
same script. That takes seconds, so that script is cached under the package's version.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from jinja2.bccache import Bucket
from markupsafe import Markup, escape

from loadgen.errors import MissingDependency, UsageError
from loadgen.system.whole_file import replacing
from reports.glossary import Terms


def render_page(
    template: str,
    drawn: Mapping[str, Any],
    cache_dir: Path | None = None,
    *,
    data: Mapping[str, Mapping[str, Any]] | None = None,
    scripts: Sequence[str] = (),
    **context: Any,
) -> str:
    """A page as text. `template` extends `page.html.j2`; `drawn` has the figures by the id of their
    HTML element, `data` further JSON objects by id; `scripts` are further files of this package.
    `cache_dir` caches the plotting bundle and compiled templates, which take seconds to make."""
    texts = [vega_bundle(cache_dir), *(asset(name) for name in ("static/page.js", *scripts))]
    terms = Terms()
    return (
        environment(cache_dir)
        .get_template(template)
        .render(
            **context,
            terms=terms,
            term=terms.term,
            help=terms.help,
            drawn=drawn,
            style=asset("static/page.css"),
            policy=policy(texts),
            scripts=texts,
            data={name: embedded(x) for name, x in {"figures": drawn, **(data or {})}.items()},
        )
    )


def write_page(path: Path, text: str) -> None:
    """Write a page to a file, whole or not at all. Raises UsageError if that fails."""
    try:
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def environment(cache_dir: Path | None = None) -> jinja2.Environment:
    """Templates of this package. Every value is escaped; a missing value is an error. `cache_dir`
    caches compiled templates: compiling takes longer than rendering."""
    loader = jinja2.FunctionLoader(lambda name: asset(f"templates/{name}"))
    made = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        bytecode_cache=_bytecode_cache(cache_dir),
    )
    made.filters["estimate"] = _estimate
    return made


def _estimate(text: str) -> Markup:
    """`431 ms ±12` with the half width of the interval below the value, which saves columns."""
    value, _, half = text.partition(" ±")
    return Markup("{} <small>±{}</small>").format(value, half) if half else escape(value)


def _bytecode_cache(cache_dir: Path | None) -> jinja2.BytecodeCache | None:
    """None for a directory that cannot be written; then templates are compiled each time."""
    if cache_dir is None:
        return None
    directory = cache_dir / f"jinja2-{version('jinja2')}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return _BytecodeCache(str(directory)) if os.access(directory, os.W_OK) else None


class _BytecodeCache(jinja2.FileSystemBytecodeCache):
    """Templates that cannot be kept, as on a full disk, are compiled again."""

    def dump_bytecode(self, bucket: Bucket) -> None:
        with contextlib.suppress(OSError):
            super().dump_bytecode(bucket)


def asset(name: str) -> str:
    """The text of a file of this package."""
    return files("reports").joinpath(name).read_text(encoding="utf-8")


def policy(scripts: Sequence[str]) -> str:
    """The content security policy: these scripts (by hash) and inline styles, no other source."""
    hashes = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline';"
        " img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def embedded(content: Mapping[str, Any]) -> str:
    """JSON for a `<script type="application/json">`; it can neither end the element nor open a
    comment."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


_SNIPPET = "window.vegaEmbed = vegaEmbed;"
_END = "\n/* slobench: end of bundle */\n"


def built_in() -> str | None:
    """The script that the build put into this package; None if it had no npm."""
    try:
        return asset("static/vega.js") + _SNIPPET
    except FileNotFoundError:
        return None


def made_by_vl_convert() -> str:
    """The script that defines `window.vegaEmbed`, bundled now. Raises MissingDependency."""
    try:
        import vl_convert
    except ImportError:
        raise MissingDependency(
            "a page needs its plotting library, and this installation has neither"
            " reports/static/vega.js (made by the build if it has npm) nor vl-convert-python:"
            " pip install 'slobench[figures]'"
        ) from None

    bundle: str = vl_convert.javascript_bundle(_SNIPPET)
    assert "</script" not in bundle.lower(), "the bundle would end its own <script> element"
    assert "<!--" not in bundle, "the bundle would open a comment in its <script> element"
    return bundle


def vega_bundle(
    cache_dir: Path | None = None,
    make: Callable[[], str] = made_by_vl_convert,
    built: Callable[[], str | None] = built_in,
) -> str:
    """The script that defines `window.vegaEmbed`; about 0.9 MB, safe inside a `<script>` element.

    If the package lacks it, `cache_dir` (e.g. ~/.cache) receives `slobench/vega-<version>.js`. With
    None, or a directory that cannot be written, every call makes the bundle then.
    """
    script = built()
    if script is not None:
        return script
    if cache_dir is None:
        return make() + _END
    path = cache_dir / "slobench" / f"vega-{_version_of_vl_convert()}.js"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        cached = path.read_text(encoding="utf-8")
        if cached.endswith(_END):
            return cached
    bundle = make() + _END
    with contextlib.suppress(OSError):
        _write_at_once(path, bundle)
    return bundle


def _version_of_vl_convert() -> str:
    try:
        return version("vl-convert-python")
    except PackageNotFoundError:
        return "none"


def _write_at_once(path: Path, text: str) -> None:
    """Write to a temporary file and rename it, so that no reader sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
