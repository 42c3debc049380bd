"""The exact error message of every invalid file in tests/golden/bad_scenarios."""

from pathlib import Path

import pytest

from loadgen.errors import ScenarioError
from loadgen.workload.scenario import load_scenario

FOLDER = Path(__file__).parent.parent / "golden" / "bad_scenarios"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_the_error_names_file_line_key_and_fix(name, check_golden, monkeypatch):
    monkeypatch.chdir(FOLDER)
    with pytest.raises(ScenarioError) as caught:
        load_scenario(f"{name}.yaml")
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{name}.yaml:") for line in lines)
    check_golden(FOLDER / f"{name}.txt", f"{caught.value}\n")


def test_every_expected_message_has_its_scenario():
    assert len(NAMES) >= 50
    assert sorted(path.stem for path in FOLDER.glob("*.txt")) == NAMES
