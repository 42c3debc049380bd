"""`slobench init` writes files that load as they are, and never over somebody's own."""

import os

import pytest
import yaml

from loadgen.cli.starter import write_starter
from loadgen.errors import UsageError
from loadgen.run.run_options import RunOptions
from loadgen.studies.nightly.matrix import night_cells
from loadgen.studies.nightly.spec import load_nightly
from loadgen.studies.nightly.verdict import CellVerdict
from loadgen.studies.nightly.view import cell_line
from loadgen.workload.scenario import load_scenario
from loadgen.workload.schedule import make_schedule
from targets.endpoint import load_target


def test_the_files_load_as_they_are(tmp_path):
    write_starter(tmp_path / "new")
    folder = tmp_path / "new" / "slobench"
    scenario_path, target_path = folder / "chat.yaml", folder / "target.yaml"
    workflow_path = tmp_path / "new" / ".github" / "workflows" / "slobench.yml"
    scenario = load_scenario(scenario_path)
    assert scenario.name == "chat"
    assert len(make_schedule(scenario)) == pytest.approx(260, abs=65)  # 4 sigma of Poisson(260)
    assert load_target(str(target_path), {}).url == "http://localhost:8000"
    steps = yaml.safe_load(workflow_path.read_text())["jobs"]["load-test"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    inside = scenario_path.relative_to(tmp_path / "new")
    assert f"slobench validate {inside}" in commands
    assert any(c.startswith(f"slobench run {inside} --target reference") for c in commands)


def test_nothing_is_overwritten_and_then_nothing_is_written(tmp_path):
    own = tmp_path / "slobench" / "target.yaml"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(UsageError, match=r"target\.yaml: already there; nothing was written"):
        write_starter(tmp_path)
    assert own.read_text() == "mine"
    assert not (tmp_path / "slobench" / "chat.yaml").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_cannot_be_written_is_told(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="cannot be written: Permission denied"):
        write_starter(tmp_path)


def test_a_file_in_place_of_a_folder_is_told(tmp_path):
    (tmp_path / "slobench").write_text("a file")
    with pytest.raises(UsageError, match="cannot be written"):
        write_starter(tmp_path)


def test_the_nightly_file_has_a_control_and_without_it_the_verdict_lists_other_causes(tmp_path):
    write_starter(tmp_path)
    path = tmp_path / "slobench" / "nightly.yaml"
    (cell,) = night_cells(load_nightly(path), path, RunOptions())
    assert cell.control is not None
    assert cell.not_excluded == ""
    text = path.read_text()
    path.write_text(text.replace("control: reference", "# control: reference"))
    (alone,) = night_cells(load_nightly(path), path, RunOptions())
    verdict = CellVerdict("chat", "worse", (), {}, 4, (), (), not_excluded=alone.not_excluded)
    assert cell_line(verdict) == (
        "chat: worse, against 4 nights. Not excluded without a control: a slower or faster "
        "machine, another host, a neighbour on it"
    )
    path.write_text(text.replace("[reference]", "[sim]").replace("control: ref", "# control: ref"))
    (virtual,) = night_cells(load_nightly(path), path, RunOptions())
    assert virtual.not_excluded == "", "virtual time has no machine"
