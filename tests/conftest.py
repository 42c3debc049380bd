"""Options and fixtures that every part of the suite shares."""

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.fork_server import ForkServer

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

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
    parser.addoption(
        "--release", action="store_true", help="also the tests marked `release`, in full length"
    )


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--release"):
        left_out = [item for item in items if item.get_closest_marker("release")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


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


@pytest.fixture(scope="session")
def page_cache(tmp_path_factory):
    """A cache directory with the plotting bundle of the pages, which takes seconds to make: made
    once, for all processes of pytest-xdist. Its parent can be XDG_CACHE_HOME."""
    from reports.page import vega_bundle

    own = tmp_path_factory.getbasetemp()
    folder = (
        (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "page-cache" / "slobench"
    )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        vega_bundle(folder)
    return folder


class CommandLine:
    """`cli(*args, cwd=…)`: the command line in a real process, bounded in time.

    On Linux the process is a fork of one that has imported the modules already: see
    tests/fork_server.py. `cli.fresh(…)` starts an interpreter.

    `*cli.lenient` lifts the thresholds of the instrument check, so that a busy test machine does
    not change the verdict.
    """

    lenient = LENIENT

    def __init__(self, cache: Path) -> None:
        direct = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        self.environ = direct | {"XDG_CACHE_HOME": str(cache), "NO_COLOR": "1"}
        self._fork_server: ForkServer | None = None

    def __call__(self, *args, cwd, environ=None, timeout_s=90):
        added = environ or {}
        if sys.platform != "linux" or any(name.startswith("PYTHON") for name in added):
            return self.fresh(*args, cwd=cwd, environ=environ, timeout_s=timeout_s)
        if self._fork_server is None:
            self._fork_server = ForkServer()
        return self._fork_server.run([*map(str, args)], cwd, self.environ | added, timeout_s)

    def close(self):
        if self._fork_server is not None:
            self._fork_server.close()

    def fresh(self, *args, cwd, environ=None, timeout_s=90):
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
def cli(tmp_path_factory, page_cache):
    cache = tmp_path_factory.mktemp("cache")
    shutil.copytree(page_cache, cache / "slobench")
    command_line = CommandLine(cache)
    yield command_line
    command_line.close()
