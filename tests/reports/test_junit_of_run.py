"""A run as JUnit XML."""

from xml.etree import ElementTree as ET

from loadgen.measure.aggregate import summarize
from reports.run.junit import junit_of_run
from tests.runs import measured_run


def cases(slo):
    root = ET.fromstring(junit_of_run(summarize(measured_run(slo=slo))))
    (suite,) = root.findall("testsuite")
    results = {}
    for case in suite.findall("testcase"):
        (child,) = [*case] or [ET.Element("passed")]
        results[case.get("name")] = child.tag
    return suite.attrib, results


def test_a_missed_slo_is_a_failure_and_a_met_one_passes():
    facts, results = cases(["p50(ttft) <= 10s", "p50(ttft) <= 20ms"])
    assert results["p50(ttft) <= 10s"] == "system-out"
    assert results["p50(ttft) <= 20ms"] == "failure"
    assert (facts["tests"], facts["failures"], facts["errors"]) == ("3", "1", "0")


def test_limits_of_requests_count_together_in_attainment():
    _, results = cases(["ttft <= 20ms"])
    assert "ttft <= 20ms" not in results
    assert [name for name, tag in results.items() if tag == "failure"] == ["attainment >= 99%"]
