"""Expositions as servers write them, and the common series read from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from targets.server_metrics import SERIES, add_up, read_metrics

VLLM_V1 = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="org/a model"} 12.0
vllm:num_requests_running{engine="1",model_name="org/a model"} 7.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="org/a model"} 3.0
vllm:num_requests_waiting{engine="1",model_name="org/a model"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="org/a model",reason="capacity"} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="org/a model"} 0.83
vllm:kv_cache_usage_perc{engine="1",model_name="org/a model"} 0.21
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{engine="0",model_name="org/a model"} 0.99
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="org/a model"} 4.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="org/a model"} 1.7e+09
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="org/a model"} 81234.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="org/a model"} 1.2345e+06
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="org/a model"} 800.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="org/a model"} 320.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="org/a model"} 5.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="org/a model"} 6.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="org/a model"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="org/a model"} 9.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="org/a model"} 1.5
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes 1e+09
"""
VLLM_V0 = """\
# TYPE vllm:num_requests_swapped gauge
vllm:num_requests_swapped{model_name="m"} 2.0
vllm:num_requests_running{model_name="m"} 1.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:gpu_prefix_cache_hit_rate{model_name="m"} 0.25
vllm:num_preemptions_total{model_name="m"} 1.0
vllm:cpu_cache_usage_perc{model_name="m"} NaN
"""
SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",model_name="m",pp_rank="0",priority="",tp_rank="0"} 9.0
sglang:num_running_reqs{dp_rank="0",model_name="m",pp_rank="0",priority="5",tp_rank="0"} 4.0
sglang:num_running_reqs{dp_rank="0",model_name="m",pp_rank="0",priority="",tp_rank="1"} 9.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 31.0
# TYPE sglang:token_usage gauge
sglang:token_usage{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 0.28
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 0.1
# TYPE sglang:num_retracted_reqs gauge
sglang:num_retracted_reqs{model_name="m"} 1.0
# TYPE sglang:num_retracted_requests_total counter
sglang:num_retracted_requests_total{model_name="m"} 48.0
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m"} 4096.0
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{is_streaming="true",model_name="m"} 70.0
sglang:generation_tokens_total{is_streaming="false",model_name="m"} 7.0
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device",model_name="m"} 1000.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 24.0
sglang:num_requests_total{model_name="m"} 17.0
"""
TGI = """\
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 4
# TYPE tgi_queue_size gauge
tgi_queue_size 7
# TYPE tgi_request_generated_tokens histogram
tgi_request_generated_tokens_bucket{le="1"} 0
tgi_request_generated_tokens_bucket{le="+Inf"} 44
tgi_request_generated_tokens_sum 8123
tgi_request_generated_tokens_count 44
tgi_request_input_length_sum 900
# TYPE tgi_request_success counter
tgi_request_success{method="generate"} 44
"""
LLAMA_CPP = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 575
# TYPE llamacpp:prompt_tokens_cached_total counter
llamacpp:prompt_tokens_cached_total 425
llamacpp:tokens_predicted_total 6789
llamacpp:requests_processing 1
llamacpp:requests_deferred 4
"""
BUNDLED = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="tiny"} 2.0
vllm:kv_cache_usage_perc{model_name="tiny"} 0.5
vllm:gpu_cache_usage_perc{model_name="tiny"} 0.5
# TYPE ref:wait_seconds_total counter
ref:wait_seconds_total{reason="kv",tenant="a"} 1.5
ref:wait_seconds_total{reason="kv",tenant="b"} 0.5
ref:wait_seconds_total{reason="seqs",tenant="a"} 3.0
ref:displaced_seconds_total{tenant="a"} 0.25
ref:padding_tokens_total 64.0
ref:policy_info{mode="chunked"} 1.0
"""
DCGM = """\
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1"} 78
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-2"} 42
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-1"} 1024
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-1"} 700.5
"""


@pytest.mark.parametrize(
    ("text", "series"),
    [
        (
            VLLM_V1,
            {
                "running": 19, "waiting": 3, "kv_usage": 0.83, "preemptions": 4,
                "prompt_tokens": 81234, "generation_tokens": 1_234_500, "cache_queries": 800,
                "cache_hits": 320, "requests": 11,
            },
        ),
        (
            VLLM_V0,
            {
                "running": 1, "swapped": 2, "kv_usage": 0.5, "cache_hit_rate": 0.25,
                "preemptions": 1,
            },
        ),
        (
            SGLANG,
            {
                "running": 9, "waiting": 31, "kv_usage": 0.28, "cache_hit_rate": 0.1,
                "preemptions": 48, "prompt_tokens": 4096, "generation_tokens": 77,
                "cache_queries": 4096, "cache_hits": 1024, "requests": 17,
            },
        ),
        (
            TGI,
            {
                "running": 4, "waiting": 7, "prompt_tokens": 900, "generation_tokens": 8123,
                "requests": 44,
            },
        ),
        (
            LLAMA_CPP,
            {
                "running": 1, "waiting": 4, "prompt_tokens": 1000, "generation_tokens": 6789,
                "cache_queries": 1000, "cache_hits": 425,
            },
        ),
        (
            BUNDLED,
            {
                "running": 2, "kv_usage": 0.5, 'wait_s{reason="kv"}': 2.0,
                'wait_s{reason="seqs"}': 3.0, "displaced_s": 0.25, "padding_tokens": 64,
            },
        ),
        (
            DCGM,
            {"gpu_utilization": 0.6, "gpu_memory_bytes": 1024 * 2**20, "gpu_power_w": 700.5},
        ),
        ("", {}),
        ("# only a comment\nunknown_metric 3\n", {}),
    ],
)  # fmt: skip
def test_each_server_is_read_under_common_names(text, series):
    assert read_metrics(text) == pytest.approx(series)


@pytest.mark.parametrize("text", ["vllm:num_requests_running{oops 1\n", "tgi_queue_size many\n"])
def test_text_that_is_no_exposition_is_an_error(text):
    with pytest.raises(ValueError, match=r".+"):
        read_metrics(text)


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_servers_side_by_side_are_added_up_and_shares_are_of_the_fullest(first, second):
    readings = [
        {"running": first, "kv_usage": 0.2, "gpu_utilization": 0.5, 'wait_s{reason="kv"}': first},
        {"running": second, "kv_usage": 0.9, "gpu_utilization": 0.7},
    ]
    assert add_up(readings) == pytest.approx(
        {
            "running": first + second,
            "kv_usage": 0.9,
            "gpu_utilization": 0.6,
            'wait_s{reason="kv"}': first,
        }
    )


def test_no_two_series_have_one_name():
    assert len({series.name for series in SERIES}) == len(SERIES)
