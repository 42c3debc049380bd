"""What the page of a run says of the bundled engine follows from the engine's own log."""

import json
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loadgen.lab.engine_report import engine_section
from loadgen.manifest.sections import (
    FailureSection,
    HostMemorySection,
    ReplicaSection,
    ScalingSection,
    SimulatedEngineSection,
    TransferSection,
)
from loadgen.measure.aggregate import summarize
from loadgen.run.conclude import summarized
from reference_engine.core.setup import Setup
from reference_engine.state.plan import How, Limits
from reference_engine.step_log.step_files import (
    EVENT_SCHEMA,
    EVENTS,
    SCHEMA_KEY,
    STEP_SCHEMA,
    STEPS,
)
from reports.run.engine_section import (
    MissReason,
    blocker_rows,
    engine_figures,
    replica_table,
    simulated_section,
)
from reports.run.page import render
from tests.runs import measured_run, with_manifest


def step(number, t_s, end_s, causes=(), **counts):
    row: dict[str, Any] = {field.name: 0 for field in STEP_SCHEMA}
    row |= {"policy": "chunked", "action": "", "group": None, "items": []}
    told = [{"reason": reason, "requests": n} for reason, n in causes]
    return row | {"step": number, "t_s": t_s, "end_s": end_s, "causes": told} | counts


SETUP = Setup(
    policy={"kind": "chunked"}, limits=Limits(8, 64, 128, 32), n_blocks=10, block_tokens=16,
    prefix_cache=False, n_host_blocks=0, copy_s=0.0, preempt=next(iter(How)), async_depth=0,
    is_strict=False, cost=None, half_life=None,
)  # fmt: skip


def write_log(directory, steps):
    said = {SCHEMA_KEY: "2"}
    table = pa.Table.from_pylist(steps, STEP_SCHEMA.with_metadata(said))
    pq.write_table(table, directory / STEPS)
    event = {"t_s": 0.0, "step": 0, "kind": "start", "request_id": "", "tenant": "", "actor": ""}
    begun = event | {"detail": json.dumps(asdict(SETUP))}
    came = event | {"kind": "arrival", "detail": "{}"}  # without its tokens: level "sizes"
    events = pa.Table.from_pylist([begun, came], EVENT_SCHEMA.with_metadata(said))
    pq.write_table(events, directory / EVENTS)


@pytest.fixture(scope="module")
def run():
    return with_manifest(measured_run(slo=["ttft <= 1s"]), window={"warmup_s": 1, "measure_s": 9})


@pytest.fixture
def story(run, tmp_path):
    """Ten steps of a second: 100 prompt tokens each; from the third on two wait for a slot, and in
    the last one besides one for memory. What waited in the first second was warm-up."""
    steps = [
        step(k, float(k), k + 0.5, [("no_seq_slot", 2)] if k >= 2 else [("token_x", 5)] * (k == 0),
             n_prefill_tokens=100, n_decode=4, kv_used_blocks=k)
        for k in range(9)
    ]  # fmt: skip
    steps.append(step(9, 9.0, 10.0, [("no_seq_slot", 2), ("no_kv_blocks", 1)], kv_used_blocks=9))
    write_log(tmp_path, steps)
    return engine_section(tmp_path, run)


def test_waits_are_requests_left_times_the_seconds_until_the_next_plan(story):
    assert story.waits_s == {"sequence slots": 2 * 8.0, "KV blocks": 1.0}
    mean = [w["requests"] for w in story.waiting if w["reason"] == "sequence slots"]
    lasted = [w["to_s"] - w["from_s"] for w in story.waiting if w["reason"] == "sequence slots"]
    assert sum(m * s for m, s in zip(mean, lasted, strict=True)) == pytest.approx(16.0)


def test_tokens_and_memory_are_told_per_bin(story):
    tokens = sum(b["prefill"] * (b["to_s"] - b["from_s"]) for b in story.bins)
    assert tokens == pytest.approx(900.0)
    assert max(b["kv"] for b in story.bins) == 0.9  # 9 of 10 blocks


def test_a_log_of_sizes_says_what_would_tell_more(story):
    assert "log_level=full" in story.note
    assert (story.why, story.blockers, story.misses) == ({}, (), ())


def test_without_a_log_there_is_nothing_to_tell(run, tmp_path):
    assert engine_section(tmp_path, run) is None


@pytest.mark.parametrize("name", [STEPS, EVENTS])
def test_a_damaged_log_costs_neither_the_numbers_nor_the_page(name, run, story, cache, tmp_path):
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    found = summarized(run, tmp_path, None, None, cache, engine_section)
    told = json.loads((tmp_path / "summary.json").read_text())
    assert (found.verdict, told["verdict"]) == ("met", "met")
    page = (tmp_path / "report.html").read_text()
    assert "The engine&#39;s log cannot be read: " in page
    assert 'id="engine"' not in page


def test_the_numbers_are_written_whatever_becomes_of_the_story(run, cache, tmp_path):
    def broken(directory, run, is_own_promise):
        raise RuntimeError("a fault of its own")

    with pytest.raises(RuntimeError):
        summarized(run, tmp_path, None, None, cache, broken)
    assert json.loads((tmp_path / "summary.json").read_text())["verdict"] == "met"


def test_a_run_judged_by_other_slos_is_shown_without_its_own_misses(run, tmp_path, cache):
    asked = []

    def story(directory, run, is_own_promise):
        asked.append(is_own_promise)

    summarized(run, tmp_path, ["ttft <= 10s"], None, cache, story)
    summarized(run, tmp_path, None, None, cache, story)
    assert asked == [False, True]


def test_the_page_shows_what_there_is(run, story, cache):
    page = render(run, summarize(run), cache, story)
    assert set(engine_figures(story, 10.0)) == {"engine", "engine-waits"}
    assert 'id="engine-waits"' in page
    assert '<th scope="row">sequence slots</th><td>16 s</td>' in page
    assert "log_level=full" in page


def test_a_simulated_run_says_why_its_requests_waited(run, cache):
    waits = {"chat": {"no_kv_blocks": 1.5, "step_in_flight": 0.25}, "rag": {"no_kv_blocks": 2.5,
             "no_seq_slot": 0.0}}  # fmt: skip
    simulated = with_manifest(run, engine=SimulatedEngineSection(900, 0, 0, 0, waits, 30.0, 1.0))
    page = render(simulated, summarize(simulated), cache)
    told = page.partition('id="inside"')[2].partition("</section>")[0]
    assert '<th scope="row">no kv blocks</th><td>4 s</td>' in told
    assert '<th scope="row">step in flight</th><td>250 ms</td>' in told
    assert "no seq slot" not in told
    assert 'id="engine-waits"' in told
    assert 'id="engine"' not in told


def test_the_kv_in_host_memory_is_told_with_the_time_it_cost():
    engine = SimulatedEngineSection(
        900, 3, 0, 0, {}, 30.0, 1.0, host=HostMemorySection(2e9, 1.5e9, 0.07)
    )
    section = simulated_section(engine)
    assert section is not None
    assert section.note.endswith(
        " 2 GB of KV were copied to host memory and 1.5 GB back, for which steps took 70 ms longer "
        "in sum."
    )


def test_blame_is_told_in_a_sentence():
    told = MissReason("policy", 133, [("deadline", 120), ("", 13)]).sentence()
    assert told == (
        "Batching mode: another mode would have met the SLO (133 missed SLOs); most often:"
        " deadline (120)."
    )


def test_blockers_are_told_with_the_seconds_they_cost(story):
    found = replace(story, blockers=[("r-17 (16 384 prompt tokens)", 1.61)])
    assert blocker_rows(found) == [("r-17 (16 384 prompt tokens)", "1.61 s")]


def test_the_replicas_of_a_cluster_are_listed_with_the_kv_that_moved(run):
    first = ReplicaSection("replica 1", 40, 0.5, 0.25, 90, 0, 1600, "prefill", 2e9, 0.0, 0.125)
    second = ReplicaSection("replica 2", 40, 3.0, 0.75, 900, 2, 0, "decode", 0.0, 2e9, 0.0)
    engine = SimulatedEngineSection(
        steps=990, preemptions=2, padding_tokens=0, cached_tokens=1600, waits_s={},
        simulated_s=10.0, wall_s=0.1, router="jsq", replicas=(first, second),
        transfers=TransferSection(40, 3, 2e9, 0.02, 0.5),
    )  # fmt: skip
    table = replica_table(engine)
    assert table.rows == [
        ["replica 1", "prefill", "40", "0.5", "25 %", "0", "1\u202f600", "2 GB", "0 GB", "12.5 %"],
        ["replica 2", "decode", "40", "3", "75 %", "2", "0", "0 GB", "2 GB", "0 %"],
    ]
    assert table.notes[1].startswith(
        "Requests moved 40 times with 2 GB of KV, 3 times to balance loads. A move took 500 ms of"
    )
    page = render(with_manifest(run, engine=engine), summarize(run))
    assert "Requests moved 40 times with 2 GB of KV" in page
    assert '<th scope="row">replica 2</th><td>decode</td>' in page
    changing = SimulatedEngineSection(
        steps=990, preemptions=2, padding_tokens=0, cached_tokens=1600, waits_s={},
        simulated_s=10.0, wall_s=0.1, router="jsq", replicas=(
            ReplicaSection("replica 1", 40, 0.5, 0.25, 90, 0, 0, failures=1, on_share=0.5),
        ),
        failures=FailureSection(1, 3, 2), scaling=ScalingSection(4, 2.5),
    )  # fmt: skip
    table = replica_table(changing)
    assert table.head[-2:] == ["failures", "switched on"]
    assert table.rows[0][-2:] == ["1", "50 %"]
    assert table.notes[1:] == [
        "1 failures: requests were sent again 3 times, 2 failed.",
        "2.5 replicas were on, on average; 4 were started.",
    ]
    alone = SimulatedEngineSection(
        steps=990, preemptions=0, padding_tokens=0, cached_tokens=0, waits_s={}, simulated_s=10.0,
        wall_s=0.1, router="jsq", replicas=(ReplicaSection("replica 1", 40, 0.5, 0.25, 9, 0, 0),),
    )  # fmt: skip
    assert "KV sent" not in replica_table(alone).head
