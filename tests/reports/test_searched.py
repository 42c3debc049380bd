"""A probe's page says which capacity search it belongs to, and what that has found."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from rig import queues

from loadgen.archive import checksums
from loadgen.errors import RunInvalid
from loadgen.measure.aggregate import summarize
from loadgen.run.conclude import parent_search
from loadgen.studies.capacity.files import CAPACITY
from loadgen.studies.capacity.next_probe import Question
from loadgen.studies.capacity.result import Capacity, CapacityFile, Definition, answer_of, conclude
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
    checksums.begin(tmp_path, ["capacity.json"])
    directory = tmp_path / "probes" / "03"
    directory.mkdir(parents=True)
    return directory


def test_an_answer_is_read_as_it_was_written(answer, probe):
    assert CAPACITY.read(probe.parents[1]).capacity() == answer


FOUND = Capacity(
    outcome="found", unit="req/s", value=0.92754, low=0.9213, high=0.9382, confidence=0.95,
    attainment=0.9, precision=0.1, spent_s=60.0, probes=(), client_limit=None, design_effect=None,
    slope=None,
)  # fmt: skip
WIDE = replace(FOUND, value=12.34, low=8.04, high=16.0)
OPEN = replace(FOUND, outcome="unsettled", value=None, low=8.0, high=None)


@pytest.mark.parametrize(
    ("capacity", "sentence", "parts"),
    [
        (
            FOUND,
            "between 0.921 and 0.939 req/s; promise 0.921",
            (
                "between 0.921 and 0.939 req/s; promise 0.921",
                "0.928 req/s",
                "[0.921, 0.938], 95 %",
            ),
        ),
        (
            WIDE,
            "between 8 and 16 req/s; promise 8",
            ("between 8 and 16 req/s; promise 8", "12 req/s", "[8, 16], 95 %"),
        ),
        (
            replace(WIDE, low=0.4, high=20.4),
            "up to 21 req/s; no load can be promised yet",
            ("up to 21 req/s; no load can be promised yet", "12 req/s", "[0.4, 20], 95 %"),
        ),
        (
            replace(WIDE, unit="users", value=7, low=7, high=7),
            "7 users",
            ("7 users", "7 users", "[7, 7], 95 %"),
        ),
        (
            OPEN,
            "at least 8 req/s; the search stopped before any load missed the SLO",
            ("at least 8 req/s", None, None),
        ),
        (
            replace(OPEN, client_limit=9.0),
            "at least 8 req/s; the load generator could not send more",
            ("at least 8 req/s", None, None),
        ),
        (replace(OPEN, outcome="at_least"), "at least 8 req/s", ("at least 8 req/s", None, None)),
        (
            replace(OPEN, low=None, high=8.0, is_interrupted=True),
            "below 8 req/s: every load tried misses the SLO; interrupted",
            ("below 8 req/s: every load tried misses the SLO", None, None),
        ),
        (
            replace(OPEN, low=None, high=8.0, client_limit=9.0),
            "below 8 req/s: every load tried misses the SLO",
            ("below 8 req/s: every load tried misses the SLO", None, None),
        ),
        (
            replace(OPEN, outcome="misses", low=None, high=1.0),
            "below 1 req/s: the SLO is missed even there",
            ("below 1 req/s: the SLO is missed even there", None, None),
        ),
        (replace(OPEN, low=None), "unknown", ("unknown", None, None)),
    ],
)
def test_an_answer_states_its_sentence_and_the_parts_of_it(capacity, sentence, parts):
    content = capacity.to_json()
    assert content["sentence"] == sentence
    assert tuple(content[key] for key in ("result", "value_text", "interval_text")) == parts


def page_of(probe, capacity, cache, n_probes=4):
    content = {"answer": capacity.to_json(), "probes": [{}] * n_probes}
    checksums.replace(probe.parents[1], "capacity.json", json.dumps(content).encode())
    run = measured_run(slo=["p50(ttft) <= 1ms"])
    page = render(run, summarize(run), cache, directory=probe, search=parent_search(probe))
    return page.partition("SLOs</h2>")[0]


def test_the_page_of_a_probe_names_the_search_and_its_answer(probe, cache):
    top = page_of(probe, FOUND, cache)
    assert (
        "Probe 03 of a capacity search. Result when this page was written, after 4 probes: between "
        "0.921 and 0.939 req/s; promise 0.921."
    ) in top
    assert '<a href="../../report.html">' in top
    assert re.search(r'<h3>Capacity</h3>.*?<span class="value">0.928 req/s</span>', top)
    assert "[0.921, 0.938], 95 %; 90 % of requests meet the SLO" in top
    assert "slobench capacity" not in top  # it is being searched already


def test_the_page_of_a_probe_leaves_out_how_a_search_that_goes_on_ended(probe, cache):
    top = page_of(probe, OPEN, cache, n_probes=1)
    assert "Result when this page was written, after 1 probe: at least 8 req/s." in top
    assert "not yet known; 90 % of requests meet the SLO" in top
    assert "stopped" not in top


@pytest.mark.parametrize("damage", ["", "{}", '{"answer": {}, "probes": []}'])
def test_a_search_that_cannot_be_read_costs_a_probe_nothing(probe, damage):
    checksums.replace(probe.parents[1], "capacity.json", damage.encode())
    assert parent_search(probe) is None


def test_the_page_of_a_probe_does_not_show_an_edited_search(probe):
    path = probe.parents[1] / "capacity.json"
    path.write_text(path.read_text().replace('"attainment": 0.9', '"attainment": 0.8'))
    with pytest.raises(RunInvalid, match=r"capacity\.json: damaged: it does not match its line"):
        parent_search(probe)
    (probe.parents[1] / checksums.NAME).unlink()
    assert parent_search(probe) is None


def test_a_run_of_its_own_belongs_to_no_search(probe):
    assert parent_search(probe.parents[1]) is None
    assert parent_search(probe.parents[1] / "other" / "03") is None
