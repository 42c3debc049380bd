"""Every verb in the environment that `make demo` makes: slobench[engine], and no package more."""

import shlex
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from loadgen.cli.lazy_verbs import VERBS

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(400)]
BLOCKER = """
import sys
from importlib.machinery import PathFinder

ABSENT = frozenset({names})

class Present(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path = [Present if finder is PathFinder else finder for finder in sys.meta_path]
"""
SMALL = "--rate=20/s --input-len=8 --output-len=4 --duration=1s"
COMMANDS = f"""
init
validate quickstart
preview quickstart
fit trace.csv
from 'vllm bench serve --model m --request-rate 4 --num-prompts 20'
list arrivals
locustfile
run --target=mock {SMALL} --out=run
run --target=reference {SMALL} --engine=log_level=full --out=other
simulate quickstart --out=sim
report run
export run --format=csv -o run.csv
verify run
rescore run --slo=ttft<=1s
export run --format=vllm-bench -o result.json
import result.json --out=imported
judge result.json --slo=ttft<=1s
alarms nights
solve quickstart --hardware=h200 --seeds=0 --out=solved
tune quickstart --modes=chunked --seeds=1 --workers=1 --out=tune
claims --only=static-padding --seeds=1 --out=claims
compare run other
collect run
doctor --budget=1s
demo truth --rounds=1 --duration=1s --rate=5/s --output-len=4 --out=demo
capacity quickstart --target=sim --out=capacity
size quickstart --peak=20/s --hardware=h200
sweep quickstart --target=sim --over=rate=4/s,8/s --repeats=1 --out=sweep
modes quickstart --modes=continuous,chunked --rates=4 --seeds=1 --out=modes
calibrate --steps=other --shape=tiny --out=hardware.yaml --force
nightly nightly.yaml --out=night
serve --device=nowhere
web --target=mock
worker --master=127.0.0.1
"""
MISSING = {"locustfile": "web", "web": "web", "worker": "web"}
"""Verb → the extra that it needs."""
OTHER_CODES = {"alarms": 2, "collect": 2, "compare": 2, "serve": 2}
"""Verb → its exit code here: no nights, no worker keeps rows, other models, no such device."""
SCENARIO = """\
# A second of steady traffic.
schema: 1
name: steady
arrivals: {kind: constant, rate: 20/s}
requests: {input_tokens: 8, output_tokens: 4}
phases: {measure: 1s, drain: 5s}
"""
NIGHT = "schema: 1\nbaseline: baseline\nscenarios: [steady.yaml]\ntargets: [mock]\nrepeats: 2\n"


def present():
    """The distributions of slobench[engine] with all that they require."""
    names: set[str] = set()
    left: list[tuple[str, ...]] = [("slobench", "engine")]
    while left:
        name, *extras = left.pop()
        for text in distribution(name).requires or ():
            needed = Requirement(text)
            wanted = [{"extra": extra} for extra in (*extras, "")]
            if needed.marker and not any(map(needed.marker.evaluate, wanted)):
                continue
            if (key := canonicalize_name(needed.name)) not in names:
                names.add(key)
                left.append((key, *needed.extras))
    return names


def absent_modules():
    there = present() | {"slobench", "pip", "setuptools"}
    return sorted(
        module
        for module, owners in packages_distributions().items()
        if not there & {canonicalize_name(owner) for owner in owners}
    )


def test_every_verb_runs_in_the_environment_of_make_demo(cli, tmp_path):
    (tmp_path / "blocker").mkdir()
    (tmp_path / "blocker" / "sitecustomize.py").write_text(BLOCKER.format(names=absent_modules()))
    (tmp_path / "nightly.yaml").write_text(NIGHT)
    (tmp_path / "steady.yaml").write_text(SCENARIO)
    rows = [f"2024-01-01 00:00:{k / 2:09.6f},{100 + k},{10 + k % 7}" for k in range(60)]
    (tmp_path / "trace.csv").write_text(
        "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
    )
    commands = [shlex.split(line) for line in COMMANDS.strip().splitlines()]
    assert {verb for verb, *_ in commands} == set(VERBS)
    path = f"{tmp_path / 'blocker'}:{ROOT}"
    for command in commands:
        verb, *words = command
        ended = cli(verb, *words, cwd=tmp_path, environ={"PYTHONPATH": path}, timeout_s=120)
        problem = f"{command}: exit code {ended.returncode}: {ended.stderr}"
        if verb in MISSING:
            assert ended.returncode == 2, problem
            assert f"slobench[{MISSING[verb]}]" in ended.stderr
        elif verb in OTHER_CODES:
            assert ended.returncode == OTHER_CODES[verb], problem
        else:
            assert ended.returncode in (0, 1, 3), problem  # a busy machine may give no verdict
            assert "out of memory" not in ended.stderr, problem
    assert (tmp_path / "modes" / "goodput.csv").is_file()
    assert not (tmp_path / "modes" / "goodput.svg").exists()
