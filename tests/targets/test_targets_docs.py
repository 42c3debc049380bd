"""docs/targets.md names every check, option, log column and key there is."""

from pathlib import Path

import pytest

from targets.endpoint import Endpoint, Labels
from targets.mock_reply import LogRow
from targets.mock_script import FAILURES, OPTIONS
from targets.preflight_result import CHECKS

PAGE = (Path(__file__).parent.parent.parent / "docs" / "targets.md").read_text("utf-8")


@pytest.mark.parametrize(
    "word",
    [
        *(f"`{name}`" for name in CHECKS),
        *(f"--{name.replace('_', '-')}" for name in OPTIONS),
        *(f"`{name}`" for name in FAILURES),
        *(f"`{name}`" for name in LogRow.__dataclass_fields__),
        *(f"{name}: " for name in Endpoint.model_fields),
        *(f"{name}: " for name in Labels.model_fields),
    ],
)
def test_the_page_names_it(word):
    assert word in PAGE
