"""Live metrics of a run: the counters and histograms, and each way to export them."""

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

from loadgen.drive.live_sample import FINE_BOUNDS_S, SecondsHistogram
from loadgen.errors import UsageError
from loadgen.live.grafana import dashboard
from loadgen.live.live_series import INFO, INFO_LABELS, SERIES
from loadgen.live.prometheus import prometheus_endpoint
from loadgen.live.watched import RunLabels, WatchedRun
from loadgen.live.watching import Watch, one_endpoint, watching
from loadgen.measure.slo import parse_slo
from loadgen.records import Status
from tests.runs import schedule_rows

ROOT = Path(__file__).parents[2]
SLOS = [parse_slo(text) for text in ("ttft <= 150ms", "tpot <= 20ms")]


PLAN = schedule_rows(np.arange(20) / 2)


def labels(slos=SLOS):
    return RunLabels(
        run="evening-1",
        scenario="evening",
        target="http://10.0.0.7:8000/v1",
        model='tiny "llama"',
        api="chat",
        classes=("chat", "rag"),
        slos={"chat": slos, "rag": []},
        horizon_s=10.0,
    )


def ended(
    class_id=0, status=Status.ok, ttft=0.1, lateness=0.001, tpot=0.01, e2e=0.3, n=21, ttfat=0.2,
    own=None,
):  # fmt: skip
    if ttft is None:
        return [class_id, int(status), None, lateness, None, None, 0.4, None, 0.4, 0, 0, None, own]
    seconds = [ttft, lateness, tpot, e2e, e2e, 0.02, e2e - lateness]
    return [class_id, int(status), *seconds, n, 99, ttfat, own]


def beat(now_s=5.0, released=4, sent=4, in_flight=1, waiting=0, ended=(), gaps=()):
    totals = {"released": released, "sent": sent, "in_flight": in_flight, "waiting": waiting}
    return {"now_s": now_s, **totals, "ended": list(ended), "gaps": list(gaps)}


def watched(**options):
    """Two shards and four finished requests: one met its SLOs, one was slow, one failed, and one
    is of another class, which has no SLO."""
    made = WatchedRun(labels(**options), schedule_rows(np.arange(20) / 2))
    lines = [ended(), ended(ttft=0.2), ended(status=Status.timeout, ttft=None), ended(class_id=1)]
    counts = [0] * (len(FINE_BOUNDS_S) + 1)
    counts[3] = 20
    made.take(0, beat(ended=lines[:2], gaps=[[0, counts, 0.2]]))
    made.take(1, beat(now_s=4.9, sent=3, ended=lines[2:], gaps=[[0, counts, 0.2]]))
    return made


def values(made):
    return {reading.series.name: reading.values for reading in made.read()}


def test_the_values_add_up_over_shards_and_classes():
    found = values(watched())
    assert list(found) == list(SERIES)
    requests = found["slobench_requests_total"]
    assert (requests["chat", "ok"], requests["chat", "timeout"], requests["rag", "ok"]) == (2, 1, 1)
    assert sum(requests.values()) == 4
    assert found["slobench_slo_met_total"] == {("chat",): 1, ("rag",): 1}
    assert found["slobench_sent_total"] == {(): 7}
    assert found["slobench_scheduled_total"] == {(): 11}  # 0, 0.5, …, 5 s
    assert found["slobench_asked_rate_per_second"] == {(): 2.0}
    assert found["slobench_goodput_per_second"] == {(): pytest.approx(0.4)}
    ttft = found["slobench_ttft_seconds"]["chat",]
    assert (sum(ttft.counts), ttft.sum_s) == (2, pytest.approx(0.3))
    assert found["slobench_ttfat_seconds"]["chat",].sum_s == pytest.approx(0.4)
    from_send = found["slobench_ttft_from_send_seconds"]["chat",]
    assert from_send.sum_s == pytest.approx(0.298)
    itl = found["slobench_itl_seconds"]["chat",]
    assert (sum(itl.counts), itl.sum_s) == (40, pytest.approx(0.4))
    assert set(found["slobench_duration_seconds"]) == {
        ("chat", "ok"), ("chat", "timeout"), ("rag", "ok"),
    }  # fmt: skip
    assert sum(found["slobench_lateness_seconds"]["chat",].counts) == 3


@pytest.mark.parametrize(
    ("slo", "is_met"),
    [
        ("ttft_from_send <= 99.5ms", True),
        ("ttft_from_send <= 98ms", False),
        ("ttfat <= 199ms", False),
        ("ttfat <= 200ms", True),
        ("e2e <= 299ms", False),
        ("e2e_from_send <= 299.1ms", True),
        ("e2e_per_token <= 15ms", True),
        ("max_stall <= 19ms", False),
        ("max_itl <= 20ms", True),
        ("close <= 300ms", True),
    ],
)
def test_an_slo_on_any_per_request_metric_is_evaluated(slo, is_met):
    made = WatchedRun(labels(slos=[parse_slo(slo)]), schedule_rows([0.0]))
    made.take(0, beat(ended=[ended()]))
    assert values(made)["slobench_slo_met_total"]["chat",] == is_met


def test_a_single_token_meets_an_slo_on_later_tokens():
    made = WatchedRun(labels(), schedule_rows([0.0]))
    made.take(0, beat(ended=[ended(tpot=None, n=1)]))
    assert values(made)["slobench_slo_met_total"]["chat",] == 1


@given(st.lists(st.floats(0, 100), max_size=40), st.lists(st.floats(0.001, 90), min_size=1))
def test_a_histogram_counts_values_at_or_below_each_bound(added, bounds):
    histogram = SecondsHistogram(tuple(sorted(set(bounds))))
    for value in added:
        histogram.add(value)
    for k, bound in enumerate(histogram.bounds_s):
        assert sum(histogram.counts[: k + 1]) == sum(value <= bound for value in added)
    assert sum(histogram.counts) == len(added)


def scraped(url):
    """Sample name → labels → value."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.items())] = sample.value
    return found


def test_prometheus_reads_the_metrics_over_http():
    with prometheus_endpoint(watched, "127.0.0.1", 0) as url:
        found = scraped(url)
        busy = int(url.split(":")[2].split("/")[0])
        second = prometheus_endpoint(watched, "127.0.0.1", busy)
        with pytest.raises(UsageError, match=rf"--metrics-port {busy}: cannot listen on"):
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
    """The series that a PromQL query names."""
    return re.findall(r"\bslobench_\w+", query)


def test_every_query_of_the_dashboard_names_a_series_and_labels_that_exist():
    label_names = {INFO: set(INFO_LABELS)}
    for name, one in SERIES.items():
        suffixes = ("_bucket", "_sum", "_count") if one.kind == "histogram" else ("",)
        label_names |= {name + suffix: set(one.labels) for suffix in suffixes}
    board = dashboard()
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queried = {name for query in queries for name in names_in(query)}
    assert queried <= set(label_names)
    assert len(queried) >= 12
    assert "slobench_slo_met_total" in queried
    for query in queries:
        for name, matchers in re.findall(r"(slobench_\w+)\{([^}]*)\}", query):
            assert set(re.findall(r'(\w+)(?:=~|!=|=)"', matchers)) <= label_names[name], query
        assert query.count("(") == query.count(")")
    for variable in board["templating"]["list"]:
        found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
        assert found
        assert found[2] in label_names[found[1]]
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


def test_several_runs_share_one_endpoint_and_each_starts_at_zero():
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

        assert requests_ended() is None  # no run has started
        assert each.port is None
        with watching(watched(), each, lines.append):
            assert requests_ended() == ("evening-1", 4)
        assert requests_ended() == ("evening-1", 4)  # until the next run starts
        second = replace(labels(), run="evening-2")
        with watching(WatchedRun(second, schedule_rows([0.0])), each, lines.append):
            assert requests_ended() == ("evening-2", 0)
    assert len(lines) == 1
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=30)


def test_without_a_port_there_is_no_endpoint():
    watch = Watch(otlp="http://collector:4318")
    with one_endpoint(watch, print) as each:
        assert each is watch


def test_a_closed_loop_offers_no_rate():
    name = "slobench_asked_rate_per_second"
    loops = replace(labels(), is_closed_loop=True)
    by_name = {
        loop.is_closed_loop: {r.series.name: r.values for r in WatchedRun(loop, PLAN).read()}
        for loop in (labels(), loops)
    }
    assert by_name[False][name] == {(): 2.0}  # 20 requests in 10 s
    assert by_name[True][name] == {}
    assert by_name[True]["slobench_achieved_rate_per_second"] == {(): 0.0}
