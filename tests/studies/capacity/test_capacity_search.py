"""The search wired to the simulator: what it keeps, how it goes on, what it refuses."""

import csv
import io
import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from rich.console import Console
from rig import queues
from typer.testing import CliRunner

import slobench as sb
from loadgen.cli.app import app
from loadgen.errors import TargetError, UsageError
from loadgen.manifest.sections import PreflightLine
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import due_rows, measured_window
from loadgen.measure.search_command import per_request_limits
from loadgen.measure.slo import parse_slo
from loadgen.records import Status
from loadgen.run.execute import execute
from loadgen.run.run_options import RunOptions
from loadgen.studies.capacity.charts import figures
from loadgen.studies.capacity.early_stop import EarlyStop
from loadgen.studies.capacity.limited import below_limit, limited_at
from loadgen.studies.capacity.next_probe import NextProbe, Question
from loadgen.studies.capacity.observed import served_per_s, why_gone
from loadgen.studies.capacity.page import render
from loadgen.studies.capacity.probe import Probe
from loadgen.studies.capacity.result import conclude
from loadgen.studies.capacity.run import search
from loadgen.studies.capacity.spec import CapacitySpec, question_of
from loadgen.studies.capacity.view import csv_text, heading, next_steps, row
from loadgen.workload.scenario import load_scenario
from tests.runs import measured_run

QUICK = (
    "requests.input_tokens=64",
    "requests.output_tokens=8",
    "phases.warmup=1s",
    "phases.measure=8s",
)


@pytest.fixture(scope="module")
def asked(page_cache):
    """`asked(*settings, **more)`: the spec of a search on the simulator."""
    options = RunOptions(engine="shape=8b", cache_dir=page_cache)

    def ask(*settings, **more):
        scenario = load_scenario("capacity_search", [*QUICK, *settings])
        return CapacitySpec(scenario, "sim", options, attainment=0.9, between=(4.0, 16.0), **more)

    return ask


QUIET = Console(quiet=True)


def test_a_search_keeps_its_probes_and_goes_on_where_it_stopped(asked, tmp_path):
    out = tmp_path / "found"
    first = search(asked(budget_s=6.0), out, QUIET, resume=False)
    kept = json.loads((out / "capacity.json").read_text())
    n = len(kept["probes"])
    assert 0 < n == len(first.probes)
    made = [p.name for p in (out / "probes").iterdir() if not p.is_symlink()]
    assert sorted(made) == [p["name"] for p in kept["probes"]]
    assert all((out / "probes" / p["name"] / "requests.parquet").exists() for p in kept["probes"])
    later = search(asked(budget_s=60.0), out, QUIET, resume=True)
    assert later.probes[:n] == first.probes
    assert len(later.probes) > n
    with (out / "capacity.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(later.probes)
    assert "<html" in (out / "report.html").read_text()


def test_the_same_search_finds_the_same_and_its_own_seed_each_probe(asked, tmp_path):
    one, two = (search(asked(budget_s=12.0), tmp_path / n, QUIET, resume=False) for n in "ab")
    assert one.probes
    assert [p.met for p in one.probes] == [p.met for p in two.probes]
    seeds = [
        json.loads((path / "manifest.json").read_text())["seed"]
        for path in (tmp_path / "a" / "probes").iterdir()
        if not path.is_symlink()
    ]
    assert len(set(seeds)) == len(seeds)


def test_a_probe_is_judged_by_the_searched_share(asked, tmp_path):
    """The client's own delay may then not change a verdict of 99 % that nobody stated."""
    search(asked(budget_s=6.0), tmp_path / "s", QUIET, resume=False)
    for path in (tmp_path / "s" / "probes").iterdir():
        slo = json.loads((path / "manifest.json").read_text())["slo"]
        assert [text for text in slo if text.startswith("attainment")] == ["attainment >= 90%"]


def test_another_search_is_not_gone_on_with(asked, tmp_path):
    search(asked(budget_s=10.0), tmp_path / "s", QUIET, resume=False)
    with pytest.raises(UsageError, match="add --resume"):
        search(asked(), tmp_path / "s", QUIET, resume=False)
    with pytest.raises(UsageError, match=r"other settings \(scenario\.seed: 7 → 8\)"):
        search(asked("seed=8"), tmp_path / "s", QUIET, resume=True)
    with pytest.raises(UsageError, match="nowhere does not exist; leave out --resume"):
        search(asked(), tmp_path / "nowhere", QUIET, resume=True)


def test_the_first_probe_leaves_time_for_others(asked, tmp_path):
    found = search(asked(budget_s=12.0), tmp_path / "s", QUIET, resume=False)
    assert found.spent_s <= 12.0 * 1.1  # each drains, which nobody plans
    assert len(found.probes) >= 2


def test_a_search_with_a_budget_goes_on_to_ten_percent(asked):
    assert question_of(asked()).precision == 0.15
    assert question_of(asked(budget_s=60.0)).precision == 0.1
    assert question_of(asked(budget_s=60.0, precision=0.2)).precision == 0.2


def test_a_budget_below_the_shortest_probe_is_refused(asked):
    with pytest.raises(UsageError) as caught:
        question_of(asked(budget_s=2.0))
    assert str(caught.value) == (
        "--budget 2s: the shortest probe takes 3 s (1 s of warm-up), and a search about five "
        "probes; write --budget 15s, or shorten phases.warmup and phases.measure"
    )


def test_no_probe_is_too_short_for_its_requests(asked, tmp_path):
    slow = replace(asked("arrivals.rate=0.1/s", budget_s=20.0), between=None)
    with pytest.raises(UsageError, match=r"--budget 20s: too short for a probe at 0\.1 req/s"):
        search(slow, tmp_path / "slow", QUIET, resume=False)
    misses = replace(asked("slo=['ttft <= 1us']", budget_s=30.0), between=None)
    found = search(misses, tmp_path / "misses", QUIET, resume=False)
    assert found.sentence().endswith("every load tried misses the SLO; the search stopped")
    assert min(probe.n_due for probe in found.probes) >= 10
    assert found.spent_s <= 30.0 * 1.1


def refusing(*_, **__):
    raise TargetError("http://127.0.0.1:9: connection refused")


def test_a_target_that_goes_away_leaves_what_was_found(asked, tmp_path):
    out, log = tmp_path / "s", io.StringIO()
    n_made = 1

    def then_gone(*args, **kwargs):
        if len(list((out / "probes").glob("[0-9]*"))) >= n_made:
            refusing()
        return execute(*args, **kwargs)

    with pytest.raises(TargetError):
        search(asked(), out, Console(file=log), resume=False, execute_run=then_gone)
    assert "ended after 1 probe (at least 8 req/s" in log.getvalue()
    assert "--resume continues" in " ".join(log.getvalue().split())
    assert "<html" in (out / "report.html").read_text()
    later = search(asked(budget_s=60.0), out, QUIET, resume=True)
    assert len(later.probes) > n_made


def test_a_target_that_was_never_there_leaves_the_directory_free(asked, tmp_path):
    for _ in range(2):
        with pytest.raises(TargetError):
            search(asked(), tmp_path / "s", QUIET, resume=False, execute_run=refusing)


def test_a_file_is_no_directory_of_a_search(asked, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a directory"):
        search(asked(), tmp_path / "file", QUIET, resume=False)


def one_probe(n_met, n_due=16):
    at_8 = Probe(8.0, (n_due,) * 16, (n_met,) * 16, 1.0, 10.0, 11.0, "measured")
    return conclude(Question(target=0.9, start=8.0), [at_8], "req/s")


def test_a_bound_says_that_the_search_ended_and_whether_it_is_proven():
    missed, kept, hardly = one_probe(0), one_probe(16), one_probe(9, n_due=10)
    assert missed.sentence() == "below 8 req/s: every load tried misses the SLO; the search stopped"
    assert missed.exit_code == 3
    assert kept.sentence() == "at least 8 req/s; the search stopped before any load missed the SLO"
    assert kept.sureness() == "1 probe, 11 s"
    assert hardly.sureness() == (
        "not certain at 95 %: only 160 requests were sent at 8 req/s, of which 144 met the SLO; "
        "1 probe, 11 s"
    )


def test_requests_of_a_probe_are_not_counted_as_independent():
    """156 of 160 independent requests would prove 90 %; these are worth about 53."""
    at_8 = Probe(8.0, (10,) * 16, (10, 10, 10, 9) * 4, 1.0, 10.0, 11.0, "measured")
    answer = conclude(Question(target=0.9, start=8.0), [at_8], "req/s")
    assert answer.sureness().startswith("not certain at 95 %: only 160 requests were sent")


@pytest.mark.parametrize(
    ("n_refused", "at_the_end", "is_gone"),
    [(0, False, False), (1, False, False), (2, False, False), (3, False, True), (1, True, True)],
)
def test_a_server_that_was_away_is_not_one_that_was_slow(n_refused, at_the_end, is_gone):
    run = measured_run()
    rows = run.request_rows.copy()
    due = np.flatnonzero(due_rows(run))
    assert len(due) == 200
    which = due[-n_refused:] if at_the_end else due[50 : 50 + n_refused]
    rows["status"][which] = Status.connect_error
    rows["error_id"][which] = 1
    names = replace(run.names, errors=("", "connect to gpu-7:8000: Connection refused"))
    why = why_gone(replace(run, request_rows=rows, names=names), due_rows(run))
    assert bool(why) is is_gone
    if is_gone:
        assert why.startswith(f"{n_refused} of 200 requests got no connection, the first ")
        assert why.endswith("gpu-7:8000: Connection refused")


@pytest.mark.parametrize(
    ("answer_s", "n_failed", "served"),
    [(0.5, 0, 10.0), (0.5, 5, 9.8), (0.5, 40, None), (4.0, 0, 10.0), (13.0, 0, None)],
)
def test_answers_are_counted_where_they_end_as_they_begin(answer_s, n_failed, served):
    """10 requests a second from the start, 2 s of warm-up, a window of 20 s."""
    run = measured_run()
    rows = run.request_rows.copy()
    rows["done_s"] = rows["first_token_s"] + answer_s
    rows["status"][100 : 100 + n_failed] = Status.timeout
    found = served_per_s(replace(run, request_rows=rows), measured_window(run))
    assert found == (None if served is None else pytest.approx(served, abs=0.11))


def test_a_drain_shows_the_throughput_while_requests_wait():
    """10 requests a second for 22 s, of which 5 a second end, each 9 s after its first token:
    before 18 s answers begin and do not end yet, and half of the 110 left at 22 s end by 33 s."""
    run = measured_run()
    rows = run.request_rows.copy()
    rows["done_s"] = (np.arange(len(rows)) + 1) / 5
    rows["first_token_s"] = rows["done_s"] - 9.0
    rows["done_s"][170:] = 34.1 + np.arange(len(rows) - 170) / 100  # not counted
    found = served_per_s(replace(run, request_rows=rows), measured_window(run))
    assert found == pytest.approx(5.0, abs=0.1)


FULL = "connect to gpu-7:8000: Cannot assign requested address (the client's own limit)"


def without_ports(finished):
    """As it was, but that the client found no port for one of its requests."""
    rows = finished.run.request_rows.copy()
    row = int(np.flatnonzero(due_rows(finished.run))[-1])
    rows["status"][row], rows["error_id"][row] = Status.connect_error, 1
    rows["first_token_s"][row] = rows["last_token_s"][row] = np.nan
    names = replace(finished.run.names, errors=("", FULL))
    run = replace(finished.run, request_rows=rows, names=names)
    return replace(finished, run=run, summary=summarize(run))


def test_a_client_without_a_port_left_is_not_a_server_that_was_away(asked, tmp_path):
    def execute_without_ports(*args, **kwargs):
        return without_ports(execute(*args, **kwargs))

    answer = search(
        asked(budget_s=60.0), tmp_path / "s", QUIET, resume=False, execute_run=execute_without_ports
    )
    assert {probe.grade for probe in answer.probes} == {"untrusted"}
    why = answer.probes[0].why
    assert "client limits: 1 of " in why
    assert why.endswith("connect to gpu-7:8000: Cannot assign requested address")
    assert answer.client_limit is not None


def test_a_server_that_is_away_twice_ends_the_search_and_nothing_counts(asked, tmp_path):
    def away(*args, **kwargs):
        finished = execute(*args, **kwargs)
        rows = finished.run.request_rows.copy()
        rows["status"][:] = Status.connect_error
        return replace(finished, run=replace(finished.run, request_rows=rows))

    with pytest.raises(TargetError, match="sim: could not be measured in two probes in a row"):
        search(asked(budget_s=60.0), tmp_path / "s", QUIET, resume=False, execute_run=away)
    kept = json.loads((tmp_path / "s" / "capacity.json").read_text())
    assert [probe["grade"] for probe in kept["probes"]] == ["broken", "broken"]
    assert len({probe["level"] for probe in kept["probes"]}) == 1
    assert kept["answer"]["sentence"] == "unknown"
    assert kept["answer"]["client_limit"] is None


def test_probes_whose_prompts_the_server_did_not_read_count_as_broken(asked, tmp_path):
    def read_in_part(*args, **kwargs):
        finished = execute(*args, **kwargs)
        rows = finished.run.request_rows.copy()
        rows["input_tokens"] = finished.run.schedule_rows["input_tokens"] // 2
        lines = (PreflightLine("prompt_fit", ok=True, detail="exact to ≤ 1 token"),)
        manifest = msgspec.structs.replace(finished.run.manifest, preflight=lines)
        return replace(finished, run=replace(finished.run, request_rows=rows, manifest=manifest))

    with pytest.raises(TargetError, match=r"The server counted .* tokens per prompt where"):
        search(asked(budget_s=60.0), tmp_path / "s", QUIET, resume=False, execute_run=read_in_part)


def test_probes_with_one_text_for_all_prompts_count_as_broken(asked, tmp_path):
    def canned(*args, **kwargs):
        finished = execute(*args, **kwargs)
        rows = finished.run.request_rows.copy()
        rows["answer_crc32"] = 7
        return replace(finished, run=replace(finished.run, request_rows=rows))

    with pytest.raises(TargetError, match=r"answers have the same text, although their prompts"):
        search(asked(budget_s=60.0), tmp_path / "s", QUIET, resume=False, execute_run=canned)


def failing(finished, is_failed, http_status, error):
    """The run with those of its rows failed."""
    rows = finished.run.request_rows.copy()
    rows["status"][is_failed], rows["http_status"][is_failed] = Status.http_error, http_status
    rows["error_id"][is_failed], rows["chunks"][is_failed] = 1, 0
    for name in ("first_chunk_s", "first_token_s", "first_answer_s", "last_token_s"):
        rows[name][is_failed] = np.nan
    chunks = finished.run.chunk_rows
    chunks = chunks[~np.isin(chunks["request_id"], rows["request_id"][is_failed])]
    names = replace(finished.run.names, errors=("", error))
    run = replace(finished.run, request_rows=rows, chunk_rows=chunks, names=names)
    return replace(finished, run=run, summary=summarize(run))


def behind_a_bucket(finished, per_s, burst):
    """The run behind a token bucket."""
    sent_s = finished.run.request_rows["sent_s"]
    refused, left, before_s = np.zeros(len(sent_s), bool), float(burst), 0.0
    for k in np.argsort(sent_s, kind="stable"):
        if not np.isfinite(sent_s[k]):
            continue
        left = min(burst, left + (sent_s[k] - before_s) * per_s)
        before_s = sent_s[k]
        refused[k] = left < 1
        left -= 0 if refused[k] else 1
    return failing(finished, refused, 429, "HTTP 429: 6 requests per second")


def test_a_search_behind_a_rate_limit_ends_at_it_and_not_at_a_latency(asked, tmp_path):
    def limited(scenario, target, options, console):
        whole = execute(scenario, target, replace(options, early=None), console)
        return behind_a_bucket(whole, per_s=6.0, burst=3)

    answer = search(asked(budget_s=120.0), tmp_path / "s", QUIET, resume=False, execute_run=limited)
    assert (answer.outcome, answer.exit_code) == ("rate_limited", 0)
    assert answer.value == pytest.approx(6.0, rel=0.1)
    assert answer.low == pytest.approx(4.75, abs=1.25)
    assert {probe.grade for probe in answer.probes} >= {"limited", answer.probes[-1].grade}
    assert answer.probes[-1].is_usable
    assert answer.probes[-1].level == answer.low
    assert answer.sentence().endswith("; a rate limit, not latency, ended the search")
    assert answer.cause.startswith("A rate limit, not latency: ")
    assert answer.cause.endswith('"6 requests per second".')
    assert answer.half_width is None
    kept = json.loads((tmp_path / "s" / "capacity.json").read_text())
    assert kept["answer"]["outcome"] == "rate_limited"
    again = search(asked(budget_s=240.0), tmp_path / "s", QUIET, resume=True, execute_run=refusing)
    assert again.probes == answer.probes
    assert "rate limit" in next_steps(again)[0]


@pytest.mark.parametrize(
    ("http_status", "error", "sentence"),
    [
        (402, "HTTP 402: Insufficient Balance", "The account, not the server, was the limit: "),
        (400, "HTTP 400: maximum context length is 9 tokens", "Refused for length: "),
    ],
)
def test_a_cause_that_no_load_changes_ends_the_search(
    asked, tmp_path, http_status, error, sentence
):
    def refused(*args, **kwargs):
        finished = execute(*args, **kwargs)
        half = np.arange(len(finished.run.request_rows)) % 2 == 0
        return failing(finished, half, http_status, error)

    with pytest.raises(TargetError, match=rf"sim: {sentence}.*The search ends with this\."):
        search(asked(budget_s=60.0), tmp_path / "s", QUIET, resume=False, execute_run=refused)
    kept = json.loads((tmp_path / "s" / "capacity.json").read_text())
    assert [probe["grade"] for probe in kept["probes"]] == ["broken"]


NEXT = NextProbe(32.0, 1.0, 5.0)


def limited_probe(level, passed_per_s):
    counts = (2,) * 16, (1,) * 16
    return Probe(level, *counts, 1.0, 5.0, 6.0, "limited", passed_per_s=passed_per_s)


def fine_probe(level):
    return Probe(level, (2,) * 16, (2,) * 16, 1.0, 5.0, 6.0, "fine")


@pytest.mark.parametrize(
    ("probes", "level"),
    [
        ([limited_probe(16.0, 10.0)], 9.0),
        ([fine_probe(8.0), limited_probe(16.0, 10.0)], None),  # measured close to the limit
        ([fine_probe(7.9), limited_probe(16.0, 10.0)], 9.0),
        ([limited_probe(16.0, None)], 9.6),  # 0.6 of a level that was limited
        ([limited_probe(16.0, 10.0)] * 6, None),
    ],
)
def test_the_next_probe_is_below_the_rate_limit(probes, level):
    limits = [limited_at(p, "req/s") for p in probes if p.grade == "limited"]
    question = Question(target=0.9, start=8.0)
    found = below_limit(question, probes, NEXT, min(limits))
    assert (found and found.level) == (level and pytest.approx(level))


def test_a_probe_below_the_rate_limit_stays_as_it_is_planned():
    low = replace(NEXT, level=8.9)
    assert below_limit(Question(target=0.9, start=8.0), [], low, 10.0) is low
    assert below_limit(Question(target=0.9, start=8.0), [], None, 10.0) is None


def test_users_behind_a_rate_limit_have_no_capacity_in_users():
    probes = [fine_probe(8.0), limited_probe(32.0, 10.0)]
    answer = conclude(Question(target=0.9, start=8.0, is_integer=True), probes, "users")
    assert (answer.outcome, answer.value, answer.exit_code) == ("rate_limited", None, 3)
    assert answer.result() == "the SLO is met at 8 users"


def test_a_capacity_below_the_rate_limit_is_that_of_the_latencies():
    missed = Probe(6.0, (9,) * 16, (1,) * 16, 1.0, 5.0, 6.0, "saturated")
    probes = [fine_probe(4.0), missed, limited_probe(32.0, 10.0)]
    assert conclude(Question(target=0.9, start=4.0), probes, "req/s").outcome == "unsettled"


def test_a_scenario_without_a_promise_to_each_request_is_refused():
    scenario = load_scenario("capacity_search", ["slo=['p99(ttft) <= 500ms']"])
    with pytest.raises(UsageError, match="--slo 'ttft<=500ms'"):
        question_of(CapacitySpec(scenario, "sim"))


def test_the_share_comes_from_the_scenario_unless_it_is_asked():
    scenario = load_scenario("capacity_search")
    assert question_of(CapacitySpec(scenario, "sim")).target == 0.99
    assert question_of(CapacitySpec(scenario, "sim", attainment=0.9)).target == 0.9


def test_from_python(asked, tmp_path):
    found = sb.capacity(
        asked().scenario, "sim", tmp_path / "p", engine="shape=8b",
        cache_dir=asked().options.cache_dir, attainment=0.9, budget_s=10.0,
    )  # fmt: skip
    assert found.unit == "req/s"
    assert len(found.probes) >= 1


def ended(status=Status.ok, ttft_s=0.1, own=None):
    return {
        "class_id": 0, "status": status, "ttft_s": ttft_s, "lateness_s": 0.0, "tpot_s": 0.01,
        "e2e_s": 1.0, "close_s": 1.0, "max_stall_s": 0.02, "duration_s": 1.0, "n_events": 9,
        "own_slo_s": own,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "grade"),
    [
        (ended(), "fine"),
        (ended(ttft_s=0.9), "saturated"),
        (ended(Status.http_error), "saturated"),
        (ended(Status.dropped, None), "saturated"),
    ],
)
def test_a_run_ends_early_when_all_is_one_way(outcome, grade):
    scenario = load_scenario("capacity_search", ["phases.warmup=1s", "phases.measure=40s"])
    early = EarlyStop(scenario, 0.9, 3.0)
    told = None
    for second in range(1, 40):
        early.note(second + 0.5, [outcome] * 20)
        told = told or early.reason(second + 0.5, in_flight=0)
    assert early.grade == grade
    assert told is not None
    assert "clearly" in told


def test_whole_answers_without_ttft_can_meet_an_slo():
    words = ["phases.warmup=1s", "phases.measure=40s", "slo=[e2e <= 300ms]"]
    early = EarlyStop(load_scenario("equal_cost", words), 0.9, 3.0)
    answer = {**ended(), "ttft_s": None, "tpot_s": None, "e2e_s": 0.1}
    for second in range(1, 40):
        early.note(second + 0.5, [answer] * 20)
        early.reason(second + 0.5, in_flight=0)
    assert early.grade == "fine"


def test_what_is_in_flight_counts_against_what_would_be_clear():
    scenario = load_scenario("capacity_search", ["phases.warmup=1s", "phases.measure=40s"])
    early = EarlyStop(scenario, 0.9, 3.0)
    for second in range(1, 12):
        early.note(second + 0.5, [ended()] * 20)
        assert early.reason(second + 0.5, in_flight=30 * second) is None


@pytest.fixture(scope="module")
def answer():
    question = Question(0.9, 0.4, precision=0.1, warmup_s=5, measure_s=20)
    _, probes = queues.search(queues.Queue(), question, np.random.default_rng(4))
    doubted = Probe(1.5, (9,) * 16, (9,) * 16, 5, 20, 25, "untrusted", "99", "client <CPU>")
    return question, conclude(question, [*probes, doubted], "req/s")


def test_the_answer_is_told_with_its_interval_and_every_probe(answer):
    _, found = answer
    assert found.exit_code == 0
    assert heading(found).startswith("CAPACITY between 0.")
    assert " req/s; promise 0." in heading(found)
    assert csv_text(found).count("\n") == len(found.probes) + 1
    assert row(found.probes[-1], found)[-1] == "untrusted"


def test_the_page_shows_probes_band_and_interval(asked, answer):
    question, found = answer
    from loadgen.studies.capacity.next_probe import judge

    posterior = judge(question, found.probes).posterior
    drawn = figures(found, posterior)
    stripe, area, line, rules, points, goal = drawn["attainment"]["layer"]
    assert stripe["data"]["values"] == [{"from": found.low, "to": found.high}]
    assert len(points["data"]["values"]) == len(found.probes)
    bounded = [p for p in found.probes if p.grade == "measured" and p.low is not None]
    assert len(rules["data"]["values"]) == len(bounded) > 0
    middle = [r["middle"] for r in line["data"]["values"]]
    assert middle == sorted(middle, reverse=True)
    assert all(r["low"] <= r["middle"] <= r["high"] for r in area["data"]["values"])
    assert goal["data"]["values"] == [{"goal": 0.9}]
    about = {"scenario": "s", "target": "t", "engine": "", "slos": "ttft <= 1s", "text": "x",
             "command": "slobench capacity s", "slobench": "1", "host": "h"}  # fmt: skip
    html = render(found, posterior, about, asked().options.cache_dir)
    assert found.sentence() in html
    assert "client &lt;CPU&gt;" in html


def test_exit_codes_and_words_of_searches_without_a_value():
    def asked_of(share):
        question = Question(0.9, 4.0, low=1.0, high=8.0)
        kept = round(100 * share)
        probes = [
            Probe(level, (100,) * 16, (kept,) * 16, 1, 10, 11, name=f"{level:g}")
            for level in (1.0, 4.0, 8.0)
        ]
        return conclude(question, probes, "req/s")

    low, high = asked_of(0.2), asked_of(1.0)
    assert (low.exit_code, low.sentence()) == (1, "below 1 req/s: the SLO is missed even there")
    assert (high.exit_code, high.sentence()) == (3, "at least 8 req/s")


@pytest.mark.parametrize(
    ("words", "unit", "note"),
    [
        (["--slo", "p99(ttft)<500ms"], "req/s", "99 % of the requests meet ttft <= 500ms"),
        (["--slo", "ttft<500ms", "--concurrency", "4"], "users", ""),
        (["--slo", "chat", "--users", "4"], "users", "not searched: p99(itl) <= 50ms"),
    ],
)
def test_a_search_from_flags_needs_only_lengths_and_an_slo(words, unit, note, tmp_path):
    shape = ["--target", "sim", "--engine", "shape=8b", "--budget", "40", "--precision", "50"]
    lengths = ["--input-len", "64", "--output-len", "8"]
    command = ["capacity", *shape, *lengths, *words, "--out", str(tmp_path / "c"), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    assert note in result.stderr
    facts = json.loads(result.stdout)
    assert (facts["unit"], facts["attainment"]) == (unit, 0.99)
    assert facts["low"] >= 4


def test_several_percentiles_become_limits_per_request_of_the_highest():
    texts = ("p99(ttft) <= 1s", "p95(tpot) <= 50ms", "p99(itl) <= 50ms", "error_rate <= 1%")
    slos = [parse_slo(text) for text in texts]
    assert per_request_limits(slos) == (["ttft <= 1s", "tpot <= 50ms"], 0.99)
    assert per_request_limits(slos[2:]) == ([], 0.0)
