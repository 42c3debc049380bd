"""A probe's page says which capacity search it belongs to, and what that has found."""

import json

import numpy as np
import pytest
from rig import queues

from loadgen.measure.aggregate import summarize
from loadgen.run.conclude import parent_search
from loadgen.studies.capacity.files import CAPACITY
from loadgen.studies.capacity.next_probe import Question
from loadgen.studies.capacity.result import CapacityFile, Definition, answer_of, conclude
from reports.run.page import render
from tests.runs import measured_run


@pytest.fixture(scope="module")
def answer():
    question = Question(0.9, 0.4, precision=0.1, warmup_s=5, measure_s=20)
    _, probes = queues.search(queues.Queue(), question, np.random.default_rng(4))
    return conclude(question, probes, "req/s")


@pytest.fixture
def probe(answer, tmp_path):
    definition = Definition(
        scenario={}, target="sim", engine="", model="", over="rate", attainment=0.9, between=None
    )
    content = CapacityFile(
        command=[], definition=definition, answer=answer_of(answer), probes=list(answer.probes)
    )
    (tmp_path / "capacity.json").write_text(json.dumps(content.to_json()))
    directory = tmp_path / "probes" / "03"
    directory.mkdir(parents=True)
    return directory


def test_an_answer_is_read_as_it_was_written(answer, probe):
    assert CAPACITY.read(probe.parents[1]).capacity() == answer


def test_the_page_of_a_probe_names_the_search_and_its_answer(answer, probe, cache):
    found = parent_search(probe)
    run = measured_run(slo=["p50(ttft) <= 1ms"])
    page = render(run, summarize(run), cache, directory=probe, search=found)
    told = page.partition("SLOs</h2>")[0]
    n = len(answer.probes)
    assert "Probe 03 of a capacity search." in told
    assert f"Result when this page was written, after {n} probes:" in told
    assert answer.sentence().partition(";")[0] in told
    assert '<a href="../../report.html">' in told
    value = answer.sentence().partition(" [")[0]
    assert f'<h3>Capacity</h3><p><span class="value">{value}</span>' in told
    assert "slobench capacity" not in told  # it is being searched already


@pytest.mark.parametrize("damage", ["", "{}", '{"answer": {}, "probes": []}'])
def test_a_search_that_cannot_be_read_costs_a_probe_nothing(probe, damage):
    (probe.parents[1] / "capacity.json").write_text(damage)
    assert parent_search(probe) is None


def test_a_run_of_its_own_belongs_to_no_search(probe):
    assert parent_search(probe.parents[1]) is None
    assert parent_search(probe.parents[1] / "other" / "03") is None
