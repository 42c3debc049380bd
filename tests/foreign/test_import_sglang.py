"""Results of `sglang.bench_serving` as runs of slobench."""

import json
import math

import msgspec
import pytest

from loadgen.errors import UsageError
from loadgen.foreign.build import Origin, build
from loadgen.foreign.foreign_run import json_values
from loadgen.foreign.sglang import read_sglang
from loadgen.measure.aggregate import summarize
from loadgen.measure.definitions import rescore
from tests.foreign.results import sglang
from tests.runs import with_manifest

ORIGIN = Origin("out.jsonl", "ab" * 32, ("slobench", "import", "out.jsonl"), "0.1.0")


def run_of(**changes):
    text = json.dumps(sglang(**changes))
    (found,) = read_sglang(json_values(text, "out.jsonl"), "out.jsonl")
    return build(found, "out", ORIGIN)


def test_ttft_and_itl_are_those_that_sglang_prints():
    rows = {row.metric: row for row in rescore(run_of(), ("vllm",))}
    shown = {
        metric: [f"{1e3 * rows[metric].percentiles[p]:.2f}" for p in ("p50", "p90", "p99")]
        for metric in ("ttft", "itl")
    }
    assert shown == {"ttft": ["250.00", "440.00", "494.00"], "itl": ["25.00", "50.00", "50.00"]}


def test_send_times_are_those_of_the_load_and_the_growth_of_load_is_not_known():
    run = run_of()
    assert run.request_rows["sent_s"].tolist() == [0.0, 0.5, 1.0, 1.5]
    checks = {check.name: check for check in summarize(run).validity.checks}
    assert checks["load"].ok is None
    assert "no send times" in summarize(run).findings[0]
    assert run.manifest.target.model == "tiny-llama"
    assert run.manifest.scenario.resolved["dataset_name"] == "random-ids"
    loop = run_of(request_rate=math.inf, max_concurrency=2)  # written as Infinity
    assert loop.request_rows["sent_s"].tolist() == pytest.approx([0.0, 0.0, 0.14, 0.24])


def test_the_native_backend_is_no_api_of_openai():
    assert run_of(backend="sglang").manifest.target.api is None
    assert run_of().manifest.target.api == "chat"


def test_a_replayed_trace_and_a_line_without_details_are_refused():
    with pytest.raises(UsageError, match=r"^out\.jsonl: request_rate: trace: neither the file"):
        run_of(request_rate="trace")
    text = json.dumps(sglang()) + "\n" + json.dumps(sglang(itls=None, errors=7)) + "\n"
    with pytest.raises(UsageError, match=r"^out\.jsonl:2: itls: expected array, found null"):
        list(read_sglang(json_values(text, "out.jsonl"), "out.jsonl"))
    bare = {key: value for key, value in sglang().items() if not isinstance(value, list)}
    with pytest.raises(UsageError, match=r"no key input_lens: .* only with --output-details"):
        list(read_sglang(json_values(json.dumps(bare), "out.jsonl"), "out.jsonl"))


def test_a_load_that_no_send_times_show_is_not_known_even_where_it_looks_steady():
    n = 50
    columns = {key: n * sglang()[key] for key in
               ("input_lens", "output_lens", "ttfts", "itls", "errors")}  # fmt: skip
    run = run_of(completed=4 * n, **columns)
    (load,) = (check for check in summarize(run).validity.checks if check.name == "load")
    assert load.ok is None
    assert load.detail == "not known: sglang.bench_serving does not record send times"
    origin = run.manifest.imported
    assert origin is not None
    stamped = msgspec.structs.replace(origin, has_send_times=True)
    (load,) = (
        check
        for check in summarize(with_manifest(run, imported=stamped)).validity.checks
        if check.name == "load"
    )
    assert load.ok is True
