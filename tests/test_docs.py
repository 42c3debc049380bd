"""The documentation and the program agree: verbs, kinds, metrics, findings, links, examples."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import yaml
from typer.main import get_command

from loadgen.cli.app import app
from loadgen.cli.kinds import FAMILIES, describe
from loadgen.measure.catalog import METRICS
from loadgen.measure.summary import ERROR_GATE
from tests.test_architecture import ROOMS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TEXT = "\n".join(page.read_text() for page in PAGES)
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]  # a group, by its type
COLUMNS = 100
REWRAPPED = [  # decisions and the changelog are history and keep their lines
    page for page in PAGES if page.parent.name != "decisions" and page.name != "CHANGELOG.md"
]


def test_each_verb_is_shown_in_use():
    missing = [verb for verb in COMMANDS if f"slobench {verb}" not in TEXT]
    assert not missing, "\n".join(missing)


def test_each_kind_is_documented():
    kinds = [(family, entry["kind"]) for family in FAMILIES for entry in describe(family)]
    missing = [
        f"{family}: {kind}"
        for family, kind in kinds
        if not re.search(rf"`{kind}`|^\| {kind} |(kind|format): {kind}", TEXT, re.MULTILINE)
    ]
    assert not missing, "\n".join(missing)
    assert len(kinds) > 50


def test_each_metric_is_documented():
    missing = [metric for metric in METRICS if f"`{metric}`" not in TEXT]
    assert not missing, "\n".join(missing)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return frozenset(text.strip().replace(" ", "-") for text in kept)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def test_links_lead_to_files_and_headings_that_exist():
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                broken.append(f"{page.relative_to(ROOT)}: no file for {target}")
            elif anchor and anchor not in anchors(file):
                broken.append(f"{page.relative_to(ROOT)}: no heading for {target}")
    assert not broken, "\n".join(broken)


def test_pages_that_code_and_files_name_exist():
    """Paths such as docs/nightly.md in code, messages, workflows and the changelog."""
    suffixes = {".py", ".toml", ".yml", ".yaml", ".j2", ".js", ".html", ".md", ".sh", ""}
    folders = (
        "loadgen reference_engine targets reports scenarios tests benchmarks scripts deploy docs"
    )
    files = [path for name in folders.split() for path in (ROOT / name).rglob("*")]
    files += [*ROOT.glob("*.*"), *(ROOT / ".github").rglob("*.yml"), ROOT / "Makefile"]
    files.remove(ROOT / "CHANGELOG.md")  # older entries name pages of their time
    missing = []
    for path in files:
        if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts:
            names = re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text("utf-8", "replace"))
            missing += [f"{path.relative_to(ROOT)}: {n}" for n in names if not (ROOT / n).exists()]
    assert not missing, "\n".join(missing)


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    missing = [name for name in pages if f"({name}" not in index]
    assert not missing, "\n".join(missing)
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()


def command_lines(text: str) -> list[str]:
    """The slobench commands of a page: in fenced or indented blocks, and in inline code."""
    fenced = "\n".join(re.findall(r"^```[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    indented = "\n".join(re.findall(r"^    (.*)$", text, re.MULTILINE))
    blocks = f"{fenced}\n{indented}".replace("\\\n", " ").splitlines()
    inline = [code.replace("\n", " ") for code in re.findall(r"`(slobench [^`]+)`", text)]
    return [line.strip() for line in blocks if line.strip().startswith("slobench ")] + inline


def unknown_words(line: str) -> list[str]:
    """The verb or the flags of a command line that do not exist."""
    command = re.split(r"\s(?:#|;|\||&&|>)\s", f"{line} ")[0].replace("…", "x")
    verb, *rest = shlex.split(command)[1:]
    if not verb.isalpha() or verb.isupper():  # `slobench --help`, `slobench VERB`
        return []
    if verb not in COMMANDS:
        return [verb]
    params = COMMANDS[verb].params
    known = {flag for param in params for flag in (*param.opts, *param.secondary_opts)}
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    return [flag for flag in flags if flag not in known]


def test_commands_on_the_pages_use_verbs_and_flags_that_exist():
    lines = [(page, line) for page in REWRAPPED for line in command_lines(page.read_text())]
    wrong = [
        f"{page.relative_to(ROOT)}: {line}: {', '.join(words)}"
        for page, line in lines
        if (words := unknown_words(line))
    ]
    assert not wrong, "\n".join(wrong)
    assert len(lines) > 80


def test_prose_lines_fit_the_line_width():
    """Tables, code and single words (links, inline code) may be longer."""
    long = []
    for page in REWRAPPED:
        for line in without_code(page.read_text()).splitlines():
            is_exempt = line.startswith(("|", "    ", "#", "<"))
            words = re.sub(r"`[^`]*`", "x", line).split()
            if len(line) > COLUMNS and not is_exempt and len(words) > 3:
                long.append(f"{page.relative_to(ROOT)}: {line[:60]}…")
    assert not long, "\n".join(long)


def test_the_architecture_page_has_a_line_for_each_room():
    page = (ROOT / "docs" / "architecture.md").read_text()
    firsts = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`(\w+)/?`", " ".join(firsts)))
    rooms = {room for lines in ROOMS.values() for line in lines for room in line.split()}
    assert not rooms - named, f"no line for {', '.join(sorted(rooms - named))}"


def test_the_frames_of_the_walk_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    frames = re.findall(r"^\| \d+ \| `([\w.]+)` \| `([\w/]+\.py)` \|", page, re.MULTILINE)
    assert len(frames) == 12
    for frame, path in frames:
        *owner, name = frame.split(".")
        scope: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
        for class_name in owner:
            (scope,) = (
                n.body for n in scope if isinstance(n, ast.ClassDef) and n.name == class_name
            )
        functions = {n.name for n in scope if isinstance(n, ast.FunctionDef)}
        assert name in functions, f"{path} has no {frame}"


def validity_checks():
    """The names of the validity checks: the first argument of `ValidityCheck` or its makers."""
    files = (ROOT / "loadgen" / "measure" / "validity").glob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.args]
    first_arguments = [
        c.args[0]
        for c in calls
        if getattr(c.func, "id", "") in ("ValidityCheck", "gate", "timing", "share_of_time")
    ]
    return sorted({a.value for a in first_arguments if isinstance(a, ast.Constant)})


def finding_kinds():
    """The functions whose sentences `findings` collects: `_not_due` is the kind "not due"."""
    tree = ast.parse((ROOT / "loadgen" / "measure" / "findings.py").read_text())
    tuples = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and getattr(node.targets[0], "id", "") in ("of_answers", "sentences")
    ]
    assert len(tuples) == 2
    names = [node.func for own in tuples for node in ast.walk(own) if isinstance(node, ast.Call)]
    return [n.id.strip("_").replace("_", " ") for n in names if isinstance(n, ast.Name)]


def test_each_validity_check_and_finding_is_explained():
    assert {"record", "lateness", "client CPU", "throttling", "stimulus"} <= set(validity_checks())
    assert {"shortened", "not due", "disk writes"} <= set(finding_kinds())
    page = (ROOT / "docs" / "reading-a-report.md").read_text()
    names = [*validity_checks(), ERROR_GATE, *finding_kinds()]
    missing = [name for name in names if f"\n### {name}\n" not in page]
    assert not missing, "\n".join(missing)


def test_every_decision_has_its_number_once():
    numbers = [path.name[:4] for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))]
    assert numbers == [f"{n:04d}" for n in range(1, len(numbers) + 1)]


def test_each_yaml_example_can_be_read():
    broken = []
    for page in PAGES:
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            try:
                yaml.safe_load(block)
            except yaml.YAMLError as error:
                broken.append(f"{page.relative_to(ROOT)}: {error}")
    assert not broken, "\n".join(broken)
