"""Options and fixtures that every part of the suite shares."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How fast a busy machine draws or runs an example says nothing about the code; in CI the examples
# are the same each time, elsewhere new ones are explored.
settings.register_profile(
    "slobench",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("slobench")

LENIENT = [
    f"--set=instrument.{key}={value}"
    for key, value in (
        ("lateness", "60s"),
        ("loop_lag", "60s"),
        ("read_backlog", "60s"),
        ("cpu", "100%"),
        ("run_delay", "100%"),
    )
]


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite golden files instead of comparing"
    )


def pytest_collection_finish():
    """Exempt the imported modules from garbage collection. With torch they are a million objects,
    which every full collection would traverse."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def check_golden(request):
    """`check_golden(path, text)`: the file holds exactly this text; --update-golden makes it so."""

    def check(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text, "utf-8")
        assert path.exists(), f"{path} does not exist; run pytest --update-golden and review it"
        assert text == path.read_text("utf-8")

    return check


@pytest.fixture(scope="session")
def truth_cache(tmp_path_factory):
    """Where the truth server's program is, compiled once: `truth_server(…, cache_dir=…)`."""
    from loadgen.errors import MissingDependency
    from targets.truth_server import truth_program

    folder = tmp_path_factory.mktemp("truth-program")
    try:
        truth_program(folder)
    except MissingDependency as error:
        pytest.skip(str(error))
    return folder


class CommandLine:
    """`cli(*args, cwd=…)`: the command line in a real process, bounded in time.

    `*cli.lenient` lifts the thresholds of the instrument check: a busy test machine is not what
    these tests are about.
    """

    lenient = LENIENT

    def __init__(self, cache: Path) -> None:
        direct = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        self.environ = direct | {"XDG_CACHE_HOME": str(cache), "NO_COLOR": "1"}

    def __call__(self, *args, cwd, environ=None, timeout_s=90):
        return subprocess.run(
            [sys.executable, "-m", "loadgen", *map(str, args)],
            cwd=cwd,
            env=self.environ | (environ or {}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


@pytest.fixture(scope="session")
def cli(tmp_path_factory):
    return CommandLine(tmp_path_factory.mktemp("cache"))
