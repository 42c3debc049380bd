"""docs/targets.md names every check, option, log column and key there is."""

from pathlib import Path

from targets.endpoint import Endpoint, Labels
from targets.mock_reply import LogRow
from targets.mock_script import FAILURES, OPTIONS
from targets.preflight_result import CHECKS

PAGE = (Path(__file__).parent.parent.parent / "docs" / "targets.md").read_text("utf-8")


def test_the_page_names_every_check_option_log_column_and_key():
    words = [
        *(f"`{name}`" for name in CHECKS),
        *(f"--{name.replace('_', '-')}" for name in OPTIONS),
        *(f"`{name}`" for name in FAILURES),
        *(f"`{name}`" for name in LogRow.__dataclass_fields__),
        *(f"{name}: " for name in Endpoint.model_fields),
        *(f"{name}: " for name in Labels.model_fields),
    ]
    assert len(words) > 60
    missing = [word for word in words if word not in PAGE]
    assert not missing, f"not in docs/targets.md: {', '.join(missing)}"
