"""What others read of a run while it goes on: the tallies, and each way to read them."""

import json
import re
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from loadgen.drive.live_sample import FINE_BOUNDS_S
from loadgen.errors import UsageError
from loadgen.live.grafana import dashboard
from loadgen.live.live_series import INFO, INFO_LABELS, SERIES, SecondsHistogram
from loadgen.live.prometheus import prometheus_endpoint
from loadgen.live.watched import RunLabels, WatchedRun
from loadgen.live.watching import Watch, one_endpoint, watching
from loadgen.measure.slo import parse_slo
from loadgen.records import Status
from tests.runs import schedule_rows

ROOT = Path(__file__).parents[2]
PROMISES = [parse_slo(text) for text in ("ttft <= 150ms", "tpot <= 20ms")]


def about(promises=PROMISES):
    return RunLabels(
        run="evening-1",
        scenario="evening",
        target="http://10.0.0.7:8000/v1",
        model='tiny "llama"',
        api="chat",
        classes=("chat", "rag"),
        promises={"chat": promises, "rag": []},
        horizon_s=10.0,
    )


def ended(
    class_id=0, status=Status.ok, ttft=0.1, lateness=0.001, tpot=0.01, e2e=0.3, n=21, own=None
):
    if ttft is None:
        return [class_id, int(status), None, lateness, None, None, 0.4, None, 0.4, 0, 0, own]
    return [class_id, int(status), ttft, lateness, tpot, e2e, e2e, 0.02, e2e - lateness, n, 99, own]


def beat(now_s=5.0, released=4, sent=4, in_flight=1, waiting=0, ended=(), gaps=()):
    totals = {"released": released, "sent": sent, "in_flight": in_flight, "waiting": waiting}
    return {"now_s": now_s, **totals, "ended": list(ended), "gaps": list(gaps)}


def watched(**asked):
    """Two shards and four ended requests: one kept its promises, one was slow, one failed, and
    one of another class, which was promised nothing."""
    made = WatchedRun(about(**asked), schedule_rows(np.arange(20) / 2))
    lines = [ended(), ended(ttft=0.2), ended(status=Status.timeout, ttft=None), ended(class_id=1)]
    counts = [0] * (len(FINE_BOUNDS_S) + 1)
    counts[3] = 20
    made.take(0, beat(ended=lines[:2], gaps=[[0, counts, 0.2]]))
    made.take(1, beat(now_s=4.9, sent=3, ended=lines[2:], gaps=[[0, counts, 0.2]]))
    return made


def values(made):
    return {reading.series.name: reading.values for reading in made.read()}


def test_the_tallies_add_up_over_shards_and_classes():
    found = values(watched())
    assert list(found) == list(SERIES)
    requests = found["slobench_requests_total"]
    assert (requests["chat", "ok"], requests["chat", "timeout"], requests["rag", "ok"]) == (2, 1, 1)
    assert sum(requests.values()) == 4
    assert found["slobench_promises_kept_total"] == {("chat",): 1, ("rag",): 1}
    assert found["slobench_sent_total"] == {(): 7}
    assert found["slobench_scheduled_total"] == {(): 11}  # 0, 0.5, …, 5 s
    assert found["slobench_asked_rate_per_second"] == {(): 2.0}
    assert found["slobench_goodput_per_second"] == {(): pytest.approx(0.4)}
    ttft = found["slobench_ttft_seconds"]["chat",]
    assert (sum(ttft.counts), ttft.sum_s) == (2, pytest.approx(0.3))
    from_send = found["slobench_ttft_from_send_seconds"]["chat",]
    assert from_send.sum_s == pytest.approx(0.298)
    itl = found["slobench_itl_seconds"]["chat",]
    assert (sum(itl.counts), itl.sum_s) == (40, pytest.approx(0.4))
    assert set(found["slobench_duration_seconds"]) == {
        ("chat", "ok"), ("chat", "timeout"), ("rag", "ok"),
    }  # fmt: skip
    assert sum(found["slobench_lateness_seconds"]["chat",].counts) == 3


@pytest.mark.parametrize(
    ("promise", "is_kept"),
    [
        ("ttft_from_send <= 99.5ms", True),
        ("ttft_from_send <= 98ms", False),
        ("ttfat <= 100ms", True),
        ("e2e <= 299ms", False),
        ("e2e_from_send <= 299.1ms", True),
        ("e2e_per_token <= 15ms", True),
        ("max_stall <= 19ms", False),
        ("max_itl <= 20ms", True),
        ("close <= 300ms", True),
    ],
)
def test_every_promise_that_can_be_made_is_judged(promise, is_kept):
    made = WatchedRun(about(promises=[parse_slo(promise)]), schedule_rows([0.0]))
    made.take(0, beat(ended=[ended()]))
    assert values(made)["slobench_promises_kept_total"]["chat",] == is_kept


def test_a_single_token_keeps_a_promise_about_later_ones():
    made = WatchedRun(about(), schedule_rows([0.0]))
    made.take(0, beat(ended=[ended(tpot=None, n=1)]))
    assert values(made)["slobench_promises_kept_total"]["chat",] == 1


@given(st.lists(st.floats(0, 100), max_size=40), st.lists(st.floats(0.001, 90), min_size=1))
def test_a_tally_counts_what_is_at_most_each_bound(added, bounds):
    tally = SecondsHistogram(tuple(sorted(set(bounds))))
    for value in added:
        tally.add(value)
    for k, bound in enumerate(tally.bounds):
        assert sum(tally.counts[: k + 1]) == sum(value <= bound for value in added)
    assert sum(tally.counts) == len(added)


def scraped(url):
    """Sample name → labels → value."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.items())] = sample.value
    return found


def test_prometheus_reads_it_over_http():
    with prometheus_endpoint(watched, "127.0.0.1", 0) as url:
        found = scraped(url)
        busy = int(url.split(":")[2].split("/")[0])
        second = prometheus_endpoint(watched, "127.0.0.1", busy)
        with pytest.raises(UsageError, match=rf"--metrics-port {busy}: .* cannot be had"):
            second.__enter__()
    assert found["slobench_sent_total"] == {(): 7}
    of_chat = (("class", "chat"),)
    assert found["slobench_ttft_seconds_count"][of_chat] == 2
    assert found["slobench_ttft_seconds_bucket"][(*of_chat, ("le", "0.15"))] == 1
    assert found["slobench_ttft_seconds_bucket"][(*of_chat, ("le", "0.2"))] == 2
    assert found["slobench_ttft_seconds_bucket"][(*of_chat, ("le", "+Inf"))] == 2
    info = dict(next(iter(found[INFO])))
    assert (info["run"], info["model"]) == ("evening-1", 'tiny "llama"')
    with pytest.raises(OSError, match="refused"):
        scraped(url)


def names_in(query):
    """Series a PromQL query asks for."""
    return re.findall(r"\bslobench_\w+", query)


def test_every_query_of_the_dashboard_names_a_series_and_labels_that_exist():
    known = {INFO: set(INFO_LABELS)}
    for name, one in SERIES.items():
        suffixes = ("_bucket", "_sum", "_count") if one.kind == "histogram" else ("",)
        known |= {name + suffix: set(one.labels) for suffix in suffixes}
    board = dashboard()
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in names_in(query)}
    assert asked <= set(known)
    assert len(asked) >= 12
    for query in queries:
        for name, matchers in re.findall(r"(slobench_\w+)\{([^}]*)\}", query):
            assert set(re.findall(r'(\w+)(?:=~|!=|=)"', matchers)) <= known[name], query
        assert query.count("(") == query.count(")")
    for variable in board["templating"]["list"]:
        found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
        assert found
        assert found[2] in known[found[1]]
    json.dumps(board, allow_nan=False)


def test_the_documentation_holds_the_table_of_the_series(check_golden):
    path = ROOT / "docs" / "outputs.md"
    head, start, rest = path.read_text("utf-8").partition("<!-- series -->\n")
    _, end, tail = rest.partition("<!-- /series -->")
    rows = ["| Prometheus | OpenTelemetry | kind | labels | meaning |", "|---|---|---|---|---|"]
    for name, series in SERIES.items():
        labels = ", ".join(f"`{label}`" for label in series.labels) or "–"
        rows.append(f"| `{name}` | `{series.otel}` | {series.kind} | {labels} | {series.help} |")
    check_golden(path, head + start + "\n".join(rows) + "\n" + end + tail)


def test_several_runs_are_read_at_one_address_each_from_its_beginning():
    lines: list[str] = []
    with one_endpoint(Watch(port=0), lines.append) as each:
        (url,) = (line.removeprefix("metrics: ") for line in lines)

        def requests_ended():
            text = urllib.request.urlopen(url, timeout=30).read().decode()
            families = {one.name: one for one in text_string_to_metric_families(text)}
            if "slobench_requests" not in families:
                return None
            (info,) = families[INFO].samples
            return info.labels["run"], sum(
                one.value for one in families["slobench_requests"].samples
            )

        assert requests_ended() is None  # nothing runs yet
        assert each.port is None
        with watching(watched(), each, lines.append):
            assert requests_ended() == ("evening-1", 4)
        assert requests_ended() == ("evening-1", 4)  # until the next one begins
        second = replace(about(), run="evening-2")
        with watching(WatchedRun(second, schedule_rows([0.0])), each, lines.append):
            assert requests_ended() == ("evening-2", 0)
    assert len(lines) == 1
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=30)


def test_who_did_not_ask_for_a_port_gets_none():
    asked = Watch(otlp="http://collector:4318")
    with one_endpoint(asked, print) as each:
        assert each is asked
