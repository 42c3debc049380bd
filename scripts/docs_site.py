"""Pages of the docs site that no file holds, as hooks of mkdocs: the command line from typer, the
Python reference from slobench's names, the gallery, and llms.txt.

Files outside docs/ that a page links to are copied to `files/`; README, CONTRIBUTING and CHANGELOG
become pages.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path
GALLERY = ROOT / "build" / "gallery"
ROOT_PAGES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
WITHOUT_SEARCH = """\
// A browser reads no index from a folder, so there the site has no search box.
if (location.protocol === "file:")
  for (const e of document.querySelectorAll("[data-md-component=search], label[for=__search]"))
    e.remove();
"""
LANDING = """\
# How much traffic can this LLM server take before it breaks its latency SLO?

![Verdict and curve of a capacity search](capacity.png){ width=640 }

```
pip install .          # in a checkout; Python 3.11 or newer, no GPU
slobench capacity --target http://localhost:8000 --input-len 512 --output-len 128 \\
    --slo 'p99(ttft)<500ms' --budget 3m
```

The first line of the result is a range of request rates: promise its lower end. Any server with an
OpenAI-compatible API can be measured; requests leave on time whether or not it keeps up, every
token is stamped at the socket, and a run that cannot be trusted says so.

- [Ten-minute tutorial](tutorial.md): check a server, measure it, find its capacity, compare.
- [vLLM and SGLang end to end](vllm-and-sglang.md) · [gate a pull request](pull-requests.md) ·
  [every night](nightly.md)
- [How each number is defined](metrics.md), and [what each fault does](reliability.md)

@PAGES@

"""
_OUTSIDE = re.compile(r"\]\((?:\.\./)+([^)#]+)(#[^)]*)?\)")
_SPECIAL = re.compile(r"(`[^`]*`)|([<>*_\[\]])")  # but not in inline code
_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages, the root's pages, and the files that pages link to."""
    pages = {"cli.md": cli_reference(), "reference.md": python_reference(), "gallery.md": gallery()}
    for source, name in ROOT_PAGES.items():
        pages[name] = from_root((ROOT / source).read_text("utf-8"))
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "folder.js", content=WITHOUT_SEARCH))
    linked = {
        target
        for page in [*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in ROOT_PAGES)]
        for target in (*outside_links(page), *of_root_page(page))
    }
    for target in sorted(linked):
        if (ROOT / target).is_file():
            copied = File.generated(config, copy_of(target), abs_src_path=str(ROOT / target))
            files.append(copied)
    for page in sorted([*GALLERY.glob("*.html"), *GALLERY.glob("*.png")]):
        copied = File.generated(config, f"gallery/{page.name}", abs_src_path=str(page))
        files.append(copied)
    return files


def copy_of(target: str) -> str:
    """The place of a file of the checkout in the site; mkdocs leaves out names with a dot."""
    return f"files/{target.replace('/.', '/').lstrip('.')}.txt"


def outside_links(page: Path) -> list[str]:
    """The files outside docs/, relative to the root, that a page of docs/ links to."""
    return [match[1] for match in _OUTSIDE.finditer(page.read_text("utf-8"))]


def of_root_page(page: Path) -> list[str]:
    if page.parent != ROOT:
        return []
    links = [match[1] for match in _LINK.finditer(page.read_text("utf-8"))]
    return [link for link in links if not link.startswith("docs/") and link not in ROOT_PAGES]


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to files outside docs/ lead to their copies; the home page begins with `landing`."""
    if page.file.src_uri == "README.md":
        markdown = landing() + markdown.replace("# Documentation", "## Documentation", 1)
    depth = "../" * page.file.src_uri.count("/")

    def moved(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if (ROOT / "docs" / target).exists() and not (ROOT / target).exists():
            return match[0]  # from decisions/ to a page of docs/
        name = ROOT_PAGES.get(target)
        return f"]({depth}{name or copy_of(target)}{anchor})"

    return _OUTSIDE.sub(moved, markdown)


def from_root(text: str) -> str:
    """A page of the root as a page of the site."""

    def moved(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if target.rstrip("/") == "docs":
            return "](README.md)"
        if target.startswith("docs/"):
            inside = target.removeprefix("docs/")
            return f"]({inside if not inside.endswith('/') else inside + 'README.md'}{anchor})"
        return f"]({ROOT_PAGES.get(target, copy_of(target))}{anchor})"

    return _LINK.sub(moved, text)


def cli_reference() -> str:
    """A section for each verb, from its typer command."""
    from loadgen.cli.lazy_verbs import VERBS, command

    parts = [
        "# Command line\n\nEvery verb and flag, made from the program. `slobench VERB --help` "
        "prints the same.\n"
    ]
    for name in VERBS:
        verb = command(name)
        parts.append(f"## slobench {name}\n\n{paragraphs(verb.help or '')}\n")
        if verb.epilog:
            parts.append(f"```\n{verb.epilog.removeprefix('Example: ')}\n```\n")
        parts.append("| flag | value | meaning |\n|---|---|---|")
        parts += [flag_row(param) for param in verb.params]
        parts.append("")
    return "\n".join(parts)


def flag_row(param: Any) -> str:
    names = ", ".join(f"`{flag}`" for flag in (*param.opts, *param.secondary_opts))
    if param.param_type_name == "argument":
        names = f"`{param.name.upper()}`"
    default = param.default
    is_shown = default not in (None, "", (), [], False) and not callable(default)
    words = paragraphs(getattr(param, "help", "") or "").replace("\n\n", " ")
    meaning = f"{words} Default: `{default}`." if is_shown else words
    cells = (names, param.display_type(None).strip("<>").lower(), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def paragraphs(text: str) -> str:
    """Help text as Markdown: lines of a paragraph joined, characters of HTML escaped."""
    joined = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    escaped = [_SPECIAL.sub(lambda m: m[1] or f"&#{ord(m[2])};", part) for part in joined]
    return "\n\n".join(escaped)


def python_reference() -> str:
    """A section for each name of `import slobench as sb`, and for the objects they return."""
    import slobench

    parts = [
        "# Python\n\n`import slobench as sb`. See [In Python and in notebooks](python.md) for "
        "examples.\n"
    ]
    objects = {f"sb.{name}": f"{home}.{name}" for name, home in sorted(slobench._HOMES.items())}
    objects |= {
        "Run": "loadgen.records.Run",
        "Summary": "loadgen.measure.summary.Summary",
        "RunOptions": "loadgen.run.run_options.RunOptions",
    }
    parts += [f"## {title}\n\n::: {path}\n" for title, path in objects.items()]
    return "\n".join(parts)


def gallery() -> str:
    """Links to the pages that scripts/gallery.py made, with their thumbnails."""
    rows = [
        f"| {thumbnail(page)} | `{page.with_suffix('.txt').read_text('utf-8').strip()}` |"
        for page in sorted(GALLERY.glob("*.html"))
    ]
    text = "# Gallery\n\nEvery kind of page, made by `scripts/gallery.py` with the simulator.\n\n"
    if not rows:
        return f"{text}This site was built without them: `make docs` makes them first.\n"
    return text + "\n".join(["| page | command |", "|---|---|", *rows]) + "\n"


def thumbnail(page: Path) -> str:
    """A link to a page of the gallery, with a picture of its first screen where one was made."""
    title, link = page.stem.replace("-", " "), f"gallery/{page.name}"
    if not page.with_suffix(".png").is_file():
        return f"[{title}]({link})"
    picture = f"![First screen of the page: {title}](gallery/{page.stem}.png){{ width=320 }}"
    return f"[{picture}<br>{title}]({link})"


def landing() -> str:
    """The beginning of the home page: what slobench answers, the first two commands, and pages."""
    shown = [GALLERY / f"{name}.html" for name in ("run-met", "capacity", "run-invalid")]
    pages = " ".join(thumbnail(page) for page in shown if page.is_file())
    return LANDING.replace("@PAGES@", pages)


def on_post_build(config: MkDocsConfig) -> None:
    """Writes llms.txt: each page of docs/ with its title and first sentence."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Docs", ""]
    for page in sorted((ROOT / "docs").glob("*.md")):
        title, first = title_and_first_sentence(page.read_text("utf-8"))
        name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
        lines.append(f"- [{title}]({name}): {first}")
    lines.append("- [Command line](cli.html): every verb and flag.")
    lines.append("- [Python](reference.html): every name of `import slobench as sb`.")
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")


def title_and_first_sentence(text: str) -> tuple[str, str]:
    title = re.search(r"^# (.*)$", text, re.MULTILINE)
    prose = [part for part in text.split("\n\n") if re.match(r"(?!```)[A-Za-z`\[*]", part)]
    first = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose[0].split())) if prose else ""
    sentence = re.split(r"(?<=[.:])\s", first)[0]
    return (title[1] if title else ""), sentence
