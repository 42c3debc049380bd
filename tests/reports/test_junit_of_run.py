"""A run as JUnit XML."""

from xml.etree import ElementTree as ET

from loadgen.measure.aggregate import summarize
from loadgen.records import Status
from reports.run.junit import junit_of_run
from tests.runs import measured_run


def cases(slo):
    root = ET.fromstring(junit_of_run(summarize(measured_run(slo=slo))))
    (suite,) = root.findall("testsuite")
    results = {}
    for case in suite.findall("testcase"):
        child = [*case, ET.Element("passed")][0]
        results[case.get("name")] = child.tag
    return suite.attrib, results


def test_a_missed_slo_is_a_failure_and_a_met_one_passes():
    facts, results = cases(["p50(ttft) <= 10s", "p50(ttft) <= 20ms"])
    assert results["p50(ttft) <= 10s"] == "system-out"
    assert results["p50(ttft) <= 20ms"] == "failure"
    assert (facts["tests"], facts["failures"], facts["errors"]) == ("3", "1", "0")


def test_the_run_has_its_requests_by_status():
    run = measured_run(n_failed=5, slo=["p50(ttft) <= 10s"])
    run.request_rows["status"][20:27] = Status.truncated
    root = ET.fromstring(junit_of_run(summarize(run)))
    assert root.findtext("testsuite/system-out") == "ok 188, http error 5, truncated 7"


def test_limits_of_requests_count_together_in_attainment():
    _, results = cases(["ttft <= 20ms"])
    assert "ttft <= 20ms" not in results
    assert [name for name, tag in results.items() if tag == "failure"] == ["attainment >= 99%"]
