"""`slobench init` writes files that load as they are, and never over somebody's own."""

import os
import site
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from loadgen.cli.starter import own_source, pinned, write_starter
from loadgen.errors import TargetFileError, UsageError
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


def test_with_a_url_each_file_measures_the_server_there(tmp_path):
    write_starter(tmp_path, url="https://llm.example/v1/completions")
    folder, workflows = tmp_path / "slobench", tmp_path / ".github" / "workflows"
    endpoint = load_target(str(folder / "target.yaml"), {})
    assert (endpoint.url, endpoint.api) == ("https://llm.example", "completions")
    nightly = yaml.safe_load((folder / "nightly.yaml").read_text())
    assert nightly["targets"] == ["target.yaml"]
    assert not {"control", "engine", "modes"} & nightly.keys()
    (cell,) = night_cells(
        load_nightly(folder / "nightly.yaml"), folder / "nightly.yaml", RunOptions()
    )
    assert cell.control is None
    for path in workflows.iterdir():
        workflow = yaml.safe_load(path.read_text())
        assert workflow["env"]["OPENAI_API_KEY"] == "${{ secrets.OPENAI_API_KEY }}"
        assert "reference" not in path.read_text()
        assert "[engine]" not in path.read_text()
    assert (
        "slobench run slobench/chat.yaml --target slobench/target.yaml --out runs/ci"
        in (workflows / "slobench.yml").read_text()
    )


@pytest.mark.parametrize("url", ["llm.example", "http://", "ftp://llm.example"])
def test_an_unusable_url_is_refused_and_nothing_is_written(tmp_path, url):
    with pytest.raises(TargetFileError):
        write_starter(tmp_path, url=url)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_then_nothing_is_written(tmp_path):
    own = tmp_path / "slobench" / "target.yaml"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(UsageError) as caught:
        write_starter(tmp_path)
    assert str(caught.value) == (
        f"{own}: already there; nothing was written. Remove them, or name another directory: "
        "slobench init DIRECTORY"
    )
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


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "source",
    [
        f"git+https://git.example/me/slobench@{COMMIT}",
        "git+ssh://git@git.example/me/slobench.git@v1.2",
        "https://files.example/slobench-0.1.0-py3-none-any.whl#sha256=00ff",
        "wheels/slobench-0.1.0-py3-none-any.whl",
    ],
)
def test_the_workflows_install_the_source_that_the_user_states(tmp_path, source):
    write_starter(tmp_path, pinned(source))
    for path in (tmp_path / ".github" / "workflows").iterdir():
        workflow = yaml.safe_load(path.read_text())
        assert workflow["env"] == {"SLOBENCH": f"${{{{ vars.SLOBENCH || '{source}' }}}}"}
        assert "@ENV@" not in path.read_text()
        assert "pip install 'slobench" not in path.read_text()  # of an index, which is another


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("git+https://git.example/me/slobench", "names no commit; write git+https://"),
        ("git+ssh://git@git.example/me/slobench", "names no commit"),
        ("slobench", "expected git+https://HOST/OWNER/REPOSITORY@COMMIT or a wheel"),
        ("slobench==0.1", "expected git+https://"),
        ("a' }} ; rm.whl", "expected git+https://"),
    ],
)
def test_a_source_that_is_not_pinned_is_refused(source, problem):
    with pytest.raises(UsageError) as caught:
        pinned(source)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("record", "source"),
    [
        (
            '{"url": "https://git.example/me/slobench", "vcs_info": {"vcs": "git", '
            f'"commit_id": "{COMMIT}", "requested_revision": "main"}}}}',
            f"git+https://git.example/me/slobench@{COMMIT}",
        ),
        (
            '{"url": "https://h/s-1-py3-none-any.whl", "archive_info": {}}',
            "https://h/s-1-py3-none-any.whl",
        ),
        ('{"url": "file:///src/slobench", "dir_info": {"editable": true}}', ""),
        (None, ""),
    ],
)
def test_the_default_is_the_source_of_this_installation(tmp_path, monkeypatch, record, source):
    folder = tmp_path / "slobench-9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: slobench\nVersion: 9\n")
    if record is not None:
        (folder / "direct_url.json").write_text(record)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert own_source() == source


def small_wheel(folder):
    """A wheel whose `slobench` runs this tree with this environment's packages."""
    path = folder / "slobench-0.1.0-py3-none-any.whl"
    info = "slobench-0.1.0.dist-info"
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in names.items())
        for group, names in groups.items()
    )
    places = [str(root), *site.getsitepackages()]
    files = {
        "slobench_tree.pth": "\n".join(places) + "\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: slobench\nVersion: 0.1.0\n"
        "Provides-Extra: engine\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        f"{info}/entry_points.txt": points,
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in files))
    return path


def shell_lines(project, name):
    """The shell lines of a workflow's only job, without those behind a condition that is false."""
    (job,) = yaml.safe_load((project / ".github" / "workflows" / name).read_text())["jobs"].values()
    return [
        step["run"] for step in job["steps"] if "run" in step and step.get("if") != "inputs.accept"
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_shell_lines_of_the_workflows_run_in_an_empty_home(tmp_path):
    project, home = tmp_path / "project", tmp_path / "home"
    home.mkdir()
    wheel = small_wheel(tmp_path)
    write_starter(project)
    for name, old, new in [
        ("chat.yaml", "warmup: 5s, measure: 60s", "measure: 2s"),
        ("steady.yaml", "warmup: 5s, measure: 30s", "measure: 2s"),
        ("nightly.yaml", "repeats: 10", "repeats: 2"),
    ]:
        path = project / "slobench" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    environ = {
        "HOME": str(home),
        "PATH": f"{tmp_path / 'venv' / 'bin'}:/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
    }

    def shell(line, source):
        done = subprocess.run(
            ["bash", "-e", "-c", line], cwd=project, env={**environ, "SLOBENCH": source},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    install, *lines = shell_lines(project, "slobench.yml")
    nightly_install, night = shell_lines(project, "slobench-nightly.yml")
    assert shell(install, "") == (
        1, "::error::SLOBENCH is empty: see the first lines of this file\n",
    )  # fmt: skip
    for line, source in ((install, str(wheel)), (nightly_install, wheel.as_uri())):
        code, printed = shell(line, source)
        assert code == 0, printed
    for line in lines:
        code, printed = shell(line, "")
        assert code in (0, 1, 3), printed  # a busy machine may be too slow for the SLO
    assert (project / "runs" / "ci" / "report.html").is_file()
    assert (project / "runs" / "junit.xml").is_file()
    code, printed = shell(night, "")
    assert code in (0, 1, 3), printed
    assert (project / "runs" / "nightly" / "junit.xml").is_file()
