"""Options and fixtures that every part of the suite shares."""

from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite golden files instead of comparing"
    )


@pytest.fixture
def check_golden(request):
    """`check_golden(path, text)`: the file holds exactly this text; --update-golden makes it so."""

    def check(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text, "utf-8")
        assert path.exists(), f"{path} does not exist; run pytest --update-golden and review it"
        assert text == path.read_text("utf-8")

    return check
