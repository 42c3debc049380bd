"""The causes of the misses of a measured run, from the command line."""

import json
import re

import pytest

pytestmark = pytest.mark.e2e
FLAGS = ["--rate=20/s", "--input-len=90", "--output-len=4", "--duration=2s"]


def test_an_slo_that_no_engine_can_meet_is_attributed_to_the_requests(cli, tmp_path):
    engine = "--engine=device=toy,shape=nano,step_s=0.02,log_level=full"
    flags = [*FLAGS, "--slo=ttft<=5ms", "--slo=e2e<=30s", *cli.lenient, "--out=run"]
    result = cli("run", "--target=reference", engine, *flags, cwd=tmp_path)
    assert result.returncode in (1, 3), result.stderr  # 3: a machine too busy for 5 ms
    result = cli("simulate", "--misses=run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    printed = json.loads(cli("simulate", "--misses=run", "--json", cwd=tmp_path).stdout)
    n = printed["n_requests"]
    assert result.stdout.splitlines()[0] == f"{n} of {n} requests missed an SLO"
    assert 20 < n < 70
    assert {(miss["blame"], miss["slo"]["metric"]) for miss in printed["misses"]} == {
        ("request", "ttft")
    }
    for miss in printed["misses"]:
        was_s, slo_s, alone_s = map(float, re.findall(r"([\d.e-]+) s", miss["sentence"]))
        assert slo_s == 0.005
        assert 0.01 < alone_s <= was_s  # a step of 20 ms, as far as a busy machine lets us see it
        assert miss["sentence"].endswith(f" s): even alone it takes {alone_s:.3g} s")


def test_misses_of_a_log_without_requests_name_the_needed_log_level(cli, tmp_path):
    engine = "--engine=device=toy,shape=nano"
    cli("run", "--target=reference", engine, *FLAGS, *cli.lenient, "--out=run", cwd=tmp_path)
    result = cli("simulate", "--misses=run", cwd=tmp_path)
    assert result.returncode == 2
    assert "log_level=full" in result.stderr
