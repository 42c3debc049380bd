"""Verdicts on the statistics of Locust, which has no requests in its files."""

import json

import pytest

from loadgen.errors import UsageError
from loadgen.foreign.locust import judge_locust, read_locust
from tests.test_verbs import slobench as command_line

HEADER = (
    "Type,Name,Request Count,Failure Count,Median Response Time,Average Response Time,"
    "Min Response Time,Max Response Time,Average Content Size,Requests/s,Failures/s,"
    "50%,66%,75%,80%,90%,95%,98%,99%,99.9%,99.99%,100%\n"
)
POST = "POST,/v1/chat,400,2,130,131.5,55.2,1203.4,800.0,20.0,0.1,130,140,150,150,180,210,400,480,1200,1200,1200\n"  # noqa: E501  # as Locust 2.47.0 writes a row
ALL = POST.replace("POST,/v1/chat", ",Aggregated")
FILE = HEADER + POST + ALL


def judged(*slos, text=FILE):
    return judge_locust(read_locust(text, "lo_stats.csv"), "lo_stats", slos)


def met(*slos, text=FILE):
    return [slo.met for slo in judged(*slos, text=text).slo]


def refusal(text, *slos):
    with pytest.raises(UsageError) as refused:
        judged(*slos, text=text)
    return str(refused.value)


def test_an_slo_is_held_against_the_number_of_all_requests():
    assert met("p99(e2e)<=500ms", "p50(e2e)<=100ms", "mean(e2e)<=131.5ms", "max(e2e)<=1s") == [
        True, False, True, False,
    ]  # fmt: skip
    assert met("p99.9(e2e)<=2s", "error_rate<=1%", "error_rate<=0.4%") == [True, True, False]
    assert judged("p99(e2e)<=500ms").exit_code == 0
    assert (judged("p50(e2e)<=100ms").verdict, judged("p50(e2e)<=100ms").exit_code) == ("missed", 1)


@pytest.mark.parametrize(
    ("limit", "is_met"), [("484ms", None), ("476ms", None), ("486ms", True), ("474ms", False)]
)
def test_a_limit_within_the_rounding_of_a_percentile_gives_no_verdict(limit, is_met):
    """480 ms stands for 475 to 485 ms."""
    found = judged(f"p99(e2e)<={limit}")
    assert [slo.met for slo in found.slo] == [is_met]
    assert found.exit_code == {None: 3, True: 0, False: 1}[is_met]


def test_the_rounding_of_locust_is_by_two_digits():
    low_high = [(slo.low, slo.high) for slo in judged("p50(e2e)<=9s", "p99.9(e2e)<=9s").slo]
    assert low_high == [(pytest.approx(0.125), pytest.approx(0.135)),
                        (pytest.approx(1.15), pytest.approx(1.25))]  # fmt: skip


def test_times_of_many_failed_requests_give_no_verdict():
    failed = FILE.replace(",400,2,", ",400,5,")
    (slo,) = judged("p99(e2e)<=500ms", text=failed).slo
    assert (slo.met, slo.note) == (None, "but 5 of 400 requests failed, whose times count there")
    assert met("p50(e2e)<=100ms", text=failed) == [False]  # a miss stands


def test_an_slo_that_the_file_does_not_have_is_refused_with_those_it_has():
    message = refusal(FILE, "p99(ttft)<=500ms")
    assert message.startswith(
        "lo_stats.csv: p99(ttft)<=500ms: not in the file, which has p50(e2e),"
    )
    assert "not in the file" in refusal(FILE, "p97(e2e)<=1s")
    assert "not in the file" in refusal(FILE, "e2e<=1s")


def test_a_damaged_file_is_refused_with_its_line():
    assert refusal("a,b\n") == ("lo_stats.csv:1: no column Name: not the NAME_stats.csv of Locust")
    assert refusal(FILE[:-20]) == "lo_stats.csv:3: the file ends within a row"
    assert refusal(FILE[:-20] + "\n") == "lo_stats.csv:3: 18 values, but 22 columns"
    assert refusal(HEADER + POST) == "lo_stats.csv: no row Aggregated: the file is damaged"
    assert refusal(FILE.replace("131.5", "x")) == (
        "lo_stats.csv:3: Average Response Time: expected a number, found 'x'"
    )
    empty = HEADER + ALL.replace("400,2,130", "0,0,N/A").replace("130,140", "N/A,N/A")
    assert met("p50(e2e)<=1s", "error_rate<=1%", text=empty) == [None, None]


def test_the_verb_judges_a_csv_and_import_refuses_it(capsys, monkeypatch, tmp_path):
    file = tmp_path / "lo_stats.csv"
    file.write_text(FILE)
    code, out, _ = command_line(capsys, monkeypatch, "judge", file, "--slo", "p99(e2e)<=500ms")
    assert (code, out) == (
        0,
        "lo_stats: MET: p99(e2e)<=500ms: 480 ms; n = 400; how sure that is cannot be known: a "
        "summary of Locust, without requests\n",
    )
    code, out, _ = command_line(capsys, monkeypatch, "judge", file, "--json")
    (content,) = json.loads(out)
    assert (code, content["kind"], content["n"]) == (0, "summary_only", 400)
    code, _, err = command_line(capsys, monkeypatch, "import", file)
    assert code == 2
    assert "a CSV file has no requests; `slobench judge` reads Locust's" in err
