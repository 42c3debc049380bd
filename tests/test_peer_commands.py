"""Command lines in the forms that the tools' own documents use, and the scenario of each.

`holds` maps dotted paths of the scenario (`target.` for the target file, `command` for a part of
slobench's command line) to their literal values; each text of `named` must appear in a line about a
missing equivalent.
"""

from dataclasses import dataclass, field

import pytest
import yaml

from loadgen.errors import UsageError
from loadgen.translate.command_line import translate
from loadgen.workload.scenario import load_scenario
from loadgen.workload.schedule import make_schedule

VLLM_ARGS = "vLLM vllm/benchmarks/serve.py and datasets, argument parsers"
GUIDELLM_07 = "guidellm 0.5, getting started and guidellm benchmark run --help"
GUIDELLM_README = "guidellm 0.8.1, README"
GUIDELLM_SCHEMA = "guidellm 0.8.1, guidellm/schemas"
AIPERF_README = "aiperf 0.13.0, README"
AIPERF_HELP = "aiperf 0.13.0, examples and options of aiperf profile --help"
GENAI_README = "genai-perf 0.0.16, README"
GENAI_ARGS = "genai-perf 0.0.16, genai_perf/parser.py"
SGLANG_ARGS = "sglang 0.5.23, sglang/benchmark/serving.py, argument parser"
LLMPERF_README = "llmperf, README"
EVALSCOPE = "evalscope, perf/arguments.py (0.x) and perf/config/cli.py (1.x)"
GENAI_BENCH = "genai-bench, cli/option_groups.py"
INFERENCE_PERF = "inference-perf 0.7.0, inference_perf/config"


@dataclass(frozen=True)
class Line:
    source: str
    command: str
    holds: dict[str, object] = field(default_factory=dict)
    named: tuple[str, ...] = ()


V = "vllm bench serve --model m "
S = "python3 -m sglang.bench_serving "
A = "aiperf profile --model m --url localhost:8000 --endpoint-type chat --streaming --osl 64 "
G = "guidellm run --backend kind=openai_http,target=http://localhost:8000 "
GD = " --data kind=synthetic_text,prompt_tokens=256,output_tokens=128 "
E = "evalscope perf --model m --url http://127.0.0.1:8000/v1/chat/completions --api openai "
B = (
    "genai-bench benchmark --api-backend vllm --api-base http://h:8000 --api-model-name m "
    "--task text-to-text "
)
L = "python token_benchmark_ray.py --model m "
P = "server: {type: vllm, model_name: m, base_url: http://h:8000}\n"
PD = "data: {type: random, input_distribution: {min: 10, max: 100, mean: 50, std_dev: 10}, \
output_distribution: {min: 20, max: 20}}\n"

LINES = {
    # vLLM
    "vllm_custom": Line(
        VLLM_ARGS,
        V + "--backend vllm --endpoint /v1/completions --dataset-name custom "
        "--dataset-path prompts.jsonl --custom-output-len 200 --request-rate 4 --num-prompts 80",
        {
            "prompts": {"kind": "dataset", "path": "prompts.jsonl"},
            "requests.output_tokens.tokens": 200,
            "arrivals": {"kind": "poisson", "rate": "4/s"},
            "phases": {"requests": 80},
            "target.api": "completions",
        },
    ),
    "vllm_custom_stated_lengths": Line(
        VLLM_ARGS,
        V + "--dataset-name custom --dataset-path p.jsonl --custom-output-len -1 --request-rate 1",
        {"prompts.path": "p.jsonl", "requests": None},
    ),
    "vllm_custom_default": Line(
        VLLM_ARGS,
        V + "--dataset-name custom --dataset-path p.jsonl --request-rate 1",
        {"requests.output_tokens.tokens": 256},
    ),
    "vllm_prefix_repetition": Line(
        VLLM_ARGS,
        V + "--dataset-name prefix_repetition --num-prompts 100 "
        "--prefix-repetition-prefix-len 512 --prefix-repetition-suffix-len 128 "
        "--prefix-repetition-num-prefixes 5 --prefix-repetition-output-len 64",
        {
            "requests.shared_prefix": {"tokens": 512, "groups": 5},
            "requests.input_tokens.tokens": 128,
            "requests.output_tokens.tokens": 64,
            "arrivals": {"kind": "burst", "requests": 100},
        },
    ),
    "vllm_prefix_repetition_default": Line(
        VLLM_ARGS,
        V + "--dataset-name prefix_repetition --request-rate 2",
        {
            "requests.shared_prefix": {"tokens": 256, "groups": 10},
            "requests.input_tokens.tokens": 256,
            "requests.output_tokens.tokens": 128,
        },
    ),
    "vllm_sonnet": Line(
        VLLM_ARGS,
        V + "--dataset-name sonnet --dataset-path benchmarks/sonnet.txt --request-rate 2",
        {
            "requests.shared_prefix.tokens": 200,
            "requests.input_tokens.tokens": 350,
            "requests.output_tokens.tokens": 150,
        },
    ),
    "vllm_sonnet_lengths": Line(
        VLLM_ARGS,
        V + "--dataset-name sonnet --sonnet-input-len 1000 --sonnet-prefix-len 100 "
        "--sonnet-output-len 30 --request-rate 2",
        {
            "requests.shared_prefix.tokens": 100,
            "requests.input_tokens.tokens": 900,
            "requests.output_tokens.tokens": 30,
        },
    ),
    "vllm_burstgpt": Line(
        VLLM_ARGS,
        V + "--dataset-name burstgpt --dataset-path BurstGPT.csv --request-rate 10",
        {
            "arrivals": {
                "kind": "trace",
                "path": "BurstGPT.csv",
                "only": ["GPT-4"],
                "rate": "10/s",
            },
            "phases.measure": "100s",
        },
    ),
    "vllm_timed_trace": Line(
        VLLM_ARGS,
        V + "--dataset-name timed_trace --dataset-path trace.jsonl",
        {"arrivals": {"kind": "trace", "path": "trace.jsonl"}},
    ),
    "vllm_order_of_the_prompts": Line(
        VLLM_ARGS,
        V + "--dataset-name custom --dataset-path p.jsonl --request-rate 1 --disable-shuffle "
        "--no-oversample",
        {"prompts.path": "p.jsonl"},
        ("--disable-shuffle", "--no-oversample"),
    ),
    "vllm_linear_ramp": Line(
        VLLM_ARGS,
        V + "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 10 "
        "--num-prompts 300",
        {  # Σ 1/r(i), r linear in i: 300 ln(10)/9 = 76.75 s
            "arrivals.kind": "ramp",
            "arrivals.shape": "exponential",
            "arrivals.from": "1/s",
            "arrivals.to": "10/s",
            "arrivals.over": "76.7528s",
            "phases": {"requests": 300},
        },
    ),
    "vllm_exponential_ramp": Line(
        VLLM_ARGS,
        V + "--ramp-up-strategy exponential --ramp-up-start-rps 1 --ramp-up-end-rps 10 "
        "--num-prompts 300",
        {  # 300 (1 − 1/10)/ln(10) = 117.26 s
            "arrivals.kind": "curve",
            "arrivals.points.0": {"at": "0s", "rate": "1/s"},
            "arrivals.points.16": {"at": "89.0876s", "rate": "3.16228/s"},
            "arrivals.points.32": {"at": "117.26s", "rate": "10/s"},
            "phases": {"requests": 300},
        },
    ),
    "vllm_bursty_ramp": Line(
        VLLM_ARGS,
        V + "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 10 "
        "--num-prompts 300 --burstiness 0.25",
        {"arrivals.kind": "curve", "arrivals.process": "gamma", "arrivals.cv": 2},
    ),
    "vllm_extra_body": Line(
        VLLM_ARGS,
        V + "--backend openai-chat --request-rate 1 --extra-body "
        """'{"chat_template_kwargs":{"enable_thinking":false}}'""",
        {"target.extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ),
    "vllm_responses": Line(
        VLLM_ARGS,
        V + "--backend openai-responses --endpoint /v1/responses --request-rate 1",
        {"target.api": "responses", "command": "--target target.yaml"},
    ),
    "vllm_samplings": Line(
        VLLM_ARGS,
        V + "--backend openai-chat --request-rate 1 --top-p 0.9 --top-k 20 --min-p 0.05 "
        "--temperature 0.7 --repetition-penalty 1.1",
        {
            "target.extra_body": {
                "top_p": 0.9,
                "top_k": 20,
                "min_p": 0.05,
                "repetition_penalty": 1.1,
            },
            "requests.temperature": 0.7,
            "command": "--target target.yaml",
        },
    ),
    "vllm_served_name": Line(
        VLLM_ARGS,
        "vllm bench serve --model /models/llama --served-model-name llama --request-rate 1",
        {"command": "--model llama"},
    ),
    "vllm_general_lengths": Line(
        VLLM_ARGS,
        V + "--input-len 300 --output-len 40 --random-input-len 9 --request-rate 1",
        {"requests.input_tokens.tokens": 300, "requests.output_tokens.tokens": 40},
    ),
    "vllm_probe": Line(
        VLLM_ARGS,
        V + "--request-rate 1 --probe-request-rate 0.5 --lora-modules a b --num-warmups 3",
        {},
        ("--probe-request-rate 0.5", "--lora-modules a b", "--num-warmups"),
    ),
    "vllm_waits_for_the_server": Line(
        VLLM_ARGS,
        V + "--request-rate 1 --ready-check-timeout-sec 600 --request-id-prefix bench-",
        {"command": "--wait-ready 600s"},
        ("--request-id-prefix bench-",),
    ),
    "vllm_no_wait": Line(
        VLLM_ARGS,
        V + "--backend openai-chat --request-rate 1 --ready-check-timeout-sec 0 --profile "
        "--no-stream --insecure",
        {"command": "run scenario.yaml --target http://127.0.0.1:8000 --model m"},
        ("--profile", "--no-stream", "--insecure"),
    ),
    "vllm_rust": Line(
        VLLM_ARGS,
        "vllm-bench serve --model m --input-len 300 --output-len 40 --request-rate 1 --ignore-eos",
        {"requests.input_tokens.tokens": 300, "arrivals.rate": "1/s"},
    ),
    "vllm_timed_trace_of_n": Line(
        VLLM_ARGS,
        V + "--dataset-name timed_trace --dataset-path trace.jsonl --num-prompts 50",
        {"arrivals.kind": "trace", "command": "--num-prompts 50"},
    ),
    "vllm_benchmark_script": Line(
        VLLM_ARGS,
        "python benchmarks/benchmark_serving.py --backend vllm --model m --dataset-name random "
        "--random-input-len 100 --random-output-len 50 --request-rate 3 --num-prompts 90",
        {"arrivals.rate": "3/s", "phases": {"requests": 90}, "target.api": "completions"},
    ),
    # SGLang
    "sglang_body_and_wait": Line(
        SGLANG_ARGS,
        S + "--dataset-name random --request-rate 1 --num-prompts 9 --return-logprob "
        "--ready-check-timeout-sec 60",
        {"command": "--wait-ready 60s"},
        ("--return-logprob",),
    ),
    "sglang_lora": Line(
        SGLANG_ARGS,
        S + "--backend sglang --dataset-name random --lora-name a b "
        "--pd-separated --tokenize-prompt --max-concurrency 64",
        {"arrivals.users": 64},
        ("--lora-name a b", "--pd-separated"),
    ),
    "sglang_mooncake_of_n": Line(
        SGLANG_ARGS,
        S
        + "--dataset-name mooncake --dataset-path m.jsonl --num-prompts 40 --use-trace-timestamps",
        {"arrivals.kind": "trace", "command": "--num-prompts 40"},
    ),
    "sglang_random": Line(
        SGLANG_ARGS,
        S + "--backend sglang --dataset-name random --num-prompts 300 --request-rate 6 "
        "--random-input 1024 --random-output 512 --random-range-ratio 0.5",
        {
            "requests.input_tokens": {"kind": "uniform", "min": 512, "max": 1024},
            "requests.output_tokens": {"kind": "uniform", "min": 256, "max": 512},
            "arrivals": {"kind": "poisson", "rate": "6/s"},
            "phases": {"requests": 300},
            "target.url": "http://127.0.0.1:30000",
            "target.api": "completions",
        },
    ),
    "sglang_random_default_ratio": Line(
        SGLANG_ARGS,
        S + "--backend sglang-oai-chat --dataset-name random-ids --random-input-len 256 "
        "--random-output-len 128 --max-concurrency 16",
        {
            "requests.input_tokens": {"kind": "uniform", "min": 1, "max": 256},
            "arrivals": {
                "kind": "users",
                "users": 16,
                "think": {"kind": "fixed", "duration": "0s"},
            },
            "command": "--target http://127.0.0.1:30000",
        },
    ),
    "sglang_vllm_chat": Line(
        SGLANG_ARGS,
        S + "--backend vllm-chat --base-url http://h:9 --model m --dataset-name random "
        "--random-range-ratio 1 --request-rate 5 --seed 1 --top-p 0.95 --temperature 0.6",
        {
            "requests.input_tokens.tokens": 1024,
            "seed": 1,
            "requests.temperature": 0.6,
            "target.extra_body": {"top_p": 0.95},
            "target.url": "http://h:9",
        },
    ),
    # bench_serving.py, run_benchmark: a backend that its table of ports does not list gets 30000
    "sglang_vllm_chat_port": Line(
        SGLANG_ARGS,
        S + "--backend vllm-chat --model m --dataset-name random --request-rate 5",
        {"target.url": None, "command": "--target http://127.0.0.1:30000 "},
    ),
    "sglang_lmdeploy_chat_port": Line(
        SGLANG_ARGS,
        S + "--backend lmdeploy-chat --model m --dataset-name random --request-rate 5",
        {"command": "--target http://127.0.0.1:30000 "},
    ),
    "sglang_lmdeploy_port": Line(
        SGLANG_ARGS,
        S + "--backend lmdeploy --model m --dataset-name random --request-rate 5",
        {"target.url": "http://127.0.0.1:23333"},
    ),
    "sglang_shared_prefix": Line(
        SGLANG_ARGS,
        S + "--dataset-name generated-shared-prefix --gsp-num-groups 8 --gsp-prompts-per-group 4 "
        "--gsp-system-prompt-len 600 --gsp-question-len 30 --gsp-output-len 20 --request-rate 2",
        {
            "requests.shared_prefix": {"tokens": 600, "groups": 8},
            "requests.input_tokens.tokens": 30,
            "requests.output_tokens.tokens": 20,
            "phases": {"requests": 32},
        },
    ),
    "sglang_zipf_turns": Line(
        SGLANG_ARGS,
        S + "--dataset-name generated-shared-prefix --gsp-group-distribution zipf "
        "--gsp-zipf-alpha 1.2 --gsp-num-turns 3 --request-rate 2",
        {
            "requests.shared_prefix.popularity": {"kind": "zipf", "exponent": 1.2},
            "requests.shared_prefix.tokens": 2048,
            "session.turns.tokens": 3,
            "phases": {"measure": "512s"},  # 64 · 16 sessions: --num-prompts counts no turns
        },
    ),
    "sglang_sharegpt": Line(
        SGLANG_ARGS,
        S + "--dataset-path sg.json --sharegpt-output-len 99 --num-prompts 10",
        {
            "prompts": {"kind": "sharegpt", "path": "sg.json"},
            "requests.output_tokens.tokens": 99,
            "arrivals": {"kind": "burst", "requests": 10},
        },
    ),
    "sglang_sharegpt_download": Line(
        SGLANG_ARGS,
        S + "--backend sglang --num-prompts 1000",
        {},
        ("--dataset-name sharegpt",),
    ),
    "sglang_mooncake": Line(
        SGLANG_ARGS,
        S + "--dataset-name mooncake --dataset-path m.jsonl --mooncake-slowdown-factor 2",
        {
            "arrivals": {
                "kind": "trace",
                "path": "m.jsonl",
                "format": {"kind": "mooncake"},
                "time_scale": 2,
            }
        },
    ),
    "sglang_extra_body": Line(
        SGLANG_ARGS,
        S + "--dataset-name random --request-rate 1 --extra-request-body "
        """'{"separate_reasoning": true}' --flush-cache --warmup-requests 4 --disable-ignore-eos""",
        {"target.extra_body": {"separate_reasoning": True, "ignore_eos": False}},
        ("--flush-cache", "--warmup-requests 4"),
    ),
    # guidellm
    "guidellm_quick_start": Line(
        GUIDELLM_README,
        G + "--profile kind=sweep --constraint kind=max_duration,seconds=30" + GD,
        {"command": "slobench capacity", "phases.measure": "30s"},
    ),
    "guidellm_constant": Line(
        GUIDELLM_README,
        G + "--profile kind=constant,rate=10 --constraint kind=max_duration,seconds=20 "
        "--data kind=synthetic_text,prompt_tokens=128,output_tokens=256",
        {
            "arrivals": {"kind": "constant", "rate": "10/s"},
            "phases.measure": "20s",
            "requests.input_tokens.tokens": 128,
            "requests.output_tokens.tokens": 256,
        },
    ),
    "guidellm_dataset": Line(
        GUIDELLM_README,
        G + "--data kind=huggingface,source=abisee/cnn_dailymail,load_kwargs.name=3.0.0 "
        "--data-column-mapper kind=generative_column_mapper,column_mappings.text_column=article",
        {},
        ("abisee/cnn_dailymail", "--data-column-mapper", "load_kwargs"),
    ),
    "guidellm_json_file": Line(
        GUIDELLM_README,
        "guidellm run --backend kind=openai_http,target=http://localhost:8000,"
        "request_format=/v1/chat/completions --data kind=json_file,path=path/to/data.json",
        {"prompts": {"kind": "dataset", "path": "path/to/data.json"}},
    ),
    "guidellm_config": Line(
        GUIDELLM_README,
        "guidellm run --config chat --backend kind=openai_http,target=http://localhost:8000",
        {},
        ("--config chat",),
    ),
    "guidellm_controls": Line(
        GUIDELLM_README,
        G + "--profile kind=concurrent,streams=16,warmup=0.1,cooldown=0.1 "
        "--constraint kind=max_errors,count=5 --constraint kind=over_saturation "
        "--constraint kind=max_duration,seconds=100" + GD,
        {
            "arrivals": {
                "kind": "users",
                "users": 16,
                "think": {"kind": "fixed", "duration": "0s"},
            },
            "phases": {"warmup": "10s", "measure": "80s"},
            "stop_when.saturated": "30s",
        },
        ("max_errors,count=5", "--cooldown 0.1"),
    ),
    "guidellm_monitor": Line(
        GUIDELLM_SCHEMA,
        G + "--profile kind=poisson,rate=2 --constraint kind=over_saturation,mode=monitor" + GD,
        {"stop_when": None},
        ("over_saturation",),
    ),
    "guidellm_error_rate": Line(
        GUIDELLM_SCHEMA,
        G
        + "--profile kind=poisson,rate=2 --constraint kind=max_error_rate,rate=0.2,window=50"
        + GD,
        {"stop_when.error_rate": "20%"},
        ("50 requests",),
    ),
    "guidellm_absolute_warmup": Line(
        GUIDELLM_SCHEMA,
        G + """--profile '{"kind":"poisson","rate":[3],"warmup":{"mode":"duration","value":15}}' """
        "--constraint kind=max_duration,seconds=75" + GD,
        {"phases": {"warmup": "15s", "measure": "1m"}, "arrivals.rate": "3/s"},
    ),
    "guidellm_replay": Line(
        GUIDELLM_SCHEMA,
        G + "--profile kind=replay,time_scale=0.5 --constraint kind=max_duration,seconds=60 "
        "--data kind=trace_synthetic,source.kind=json_file,source.path=t.jsonl,"
        "prompt_tokens_column=isl,output_tokens_column=osl",
        {
            "arrivals": {
                "kind": "trace",
                "path": "t.jsonl",
                "format": {
                    "kind": "columns",
                    "time": "timestamp",
                    "input_tokens": "isl",
                    "output_tokens": "osl",
                },
                "time_scale": 0.5,
            },
            "phases.measure": "1m",
        },
    ),
    "guidellm_mooncake": Line(
        GUIDELLM_SCHEMA,
        G + "--profile kind=replay --data kind=mooncake,source.kind=json_file,source.path=m.jsonl"
        ",copies=2",
        {"arrivals": {"kind": "trace", "path": "m.jsonl"}},
        ("copies=2",),
    ),
    "guidellm_static_seed": Line(
        GUIDELLM_SCHEMA,
        G + "--profile kind=poisson,rate=2 --seed kind=static,value=42" + GD,
        {"seed": 42},
    ),
    "guidellm_throughput": Line(
        GUIDELLM_SCHEMA,
        G + "--profile kind=throughput,max_concurrency=64" + GD,
        {"arrivals": {"kind": "users", "users": 64, "think": {"kind": "fixed", "duration": "0s"}}},
    ),
    "guidellm_capped_rate": Line(
        GUIDELLM_SCHEMA,
        G + "--profile kind=poisson,rate=5,max_concurrency=32" + GD,
        {"limits": {"max_concurrency": 32, "when_full": "wait"}},
    ),
    "guidellm_rampup": Line(
        GUIDELLM_SCHEMA,
        G + "--profile kind=concurrent,streams=8,rampup_duration=20" + GD,
        {"arrivals.ramp_up": "20s"},
    ),
    "guidellm_goodput": Line(
        GUIDELLM_SCHEMA,
        G + "--profile kind=goodput,target_attainment=0.95,max_streams=256 "
        "--metrics kind=generative,slo.ttft_ms=2000,slo.tpot_ms=100" + GD,
        {
            "slo": ["ttft_from_send <= 2s", "tpot <= 100ms", "attainment >= 95%"],
            "command": "slobench capacity",
        },
        ("max_streams=256",),
    ),
    "guidellm_bodies": Line(
        GUIDELLM_SCHEMA,
        "guidellm run --backend kind=openai_http,target=http://h:1,extras.body.top_p=0.8,"
        "api_key=sk-verysecret --profile kind=poisson,rate=1" + GD,
        {"target.extra_body": {"top_p": 0.8}},
        ("api_key=…",),
    ),
    "guidellm_prefix_bucket": Line(
        GUIDELLM_SCHEMA,
        G + "--profile kind=poisson,rate=1 --data kind=synthetic_text,prompt_tokens=50,"
        "output_tokens=10,prefix_buckets[0].prefix_tokens=200,prefix_buckets[0].prefix_count=4",
        {"requests.shared_prefix": {"tokens": 200, "groups": 4}},
    ),
    "guidellm_turns": Line(
        GUIDELLM_SCHEMA,
        G + "--profile kind=poisson,rate=1 --data kind=synthetic_text,prompt_tokens=50,"
        "output_tokens=10,turns=4,delay=2.5,delay_stdev=1",
        {
            "session": {
                "turns": {"kind": "fixed", "tokens": 4},
                "think": {"kind": "fixed", "duration": "2.5s"},
            }
        },
        ("delay_stdev=1",),
    ),
    "guidellm_flags_to_0_7": Line(
        GUIDELLM_07,
        "guidellm benchmark run --target http://h:1 --profile constant --rate 5 --max-seconds 60 "
        "--max-error-rate 0.1 --max-errors 10 --detect-saturation --random-seed 4"
        ' --data prompt_tokens=10,output_tokens=10 --data-args \'{"split":"test"}\'',
        {"stop_when": {"error_rate": "10%", "saturated": "30s"}, "seed": 4},
        ("max_errors,count=10", "--data-args"),
    ),
    "guidellm_max_requests": Line(
        GUIDELLM_07,
        "guidellm benchmark --target http://h:1 --rate-type synchronous --max-requests 20 "
        "--data prompt_tokens=64,output_tokens=32",
        {"arrivals.users": 1, "phases": {"requests": 20}},
    ),
    "guidellm_own_engine": Line(
        GUIDELLM_SCHEMA,
        "guidellm run --backend kind=vllm_python,model=m --profile kind=constant,rate=1" + GD,
        {"arrivals.rate": "1/s"},
        ("kind=vllm_python: slobench measures servers over HTTP",),
    ),
    "guidellm_request_type": Line(
        GUIDELLM_07,
        "guidellm benchmark run --target http://localhost:8000 --request-type text_completions "
        "--profile constant --rate 2 --max-seconds 20 --data prompt_tokens=9,output_tokens=5 "
        "--data-sampler random",
        {"target.api": "completions", "arrivals.rate": "2/s"},
        ("--data-sampler random",),
    ),
    # aiperf
    "aiperf_telemetry": Line(
        AIPERF_HELP,
        A
        + "--request-rate 1 --gpu-telemetry http://gpu:9400 --server-metrics http://h:8000/metrics",
        {},
        ("--gpu-telemetry http://gpu:9400: see metrics_url", "--server-metrics http://h:8000"),
    ),
    "aiperf_request_count": Line(
        AIPERF_README,
        'aiperf profile --model "granite4:350m" --streaming --endpoint-type chat '
        "--tokenizer ibm-granite/granite-4.0-micro --url http://localhost:11434 --request-count 10",
        {"arrivals.users": 1, "command": "--model granite4:350m"},
        ("no --osl",),
    ),
    "aiperf_concurrency_5": Line(
        AIPERF_README,
        'aiperf profile --model "granite4:350m" --streaming --endpoint-type chat '
        "--url http://localhost:11434 --concurrency 5 --request-count 10",
        {"arrivals.users": 5},
    ),
    "aiperf_rate_duration": Line(
        AIPERF_HELP,
        A + "--request-rate 5.0 --benchmark-duration 60 --benchmark-grace-period 30",
        {"arrivals": {"kind": "poisson", "rate": "5/s"}, "phases.measure": "1m"},
    ),
    "aiperf_cancellation": Line(
        AIPERF_HELP,
        A + "--request-rate 2 --request-cancellation-rate 20 --request-cancellation-delay 0.5",
        {"requests.cancel": {"share": "20%", "after": {"kind": "fixed", "duration": "500ms"}}},
    ),
    "aiperf_cancel_at_once": Line(
        AIPERF_HELP,
        A + "--request-rate 2 --request-cancellation-rate 5",
        {"requests.cancel": {"share": "5%", "after": {"kind": "fixed", "duration": "0s"}}},
    ),
    "aiperf_offsets": Line(
        AIPERF_HELP,
        A + "--input-file t.jsonl --custom-dataset-type mooncake_trace --fixed-schedule "
        "--fixed-schedule-start-offset 2000 --fixed-schedule-end-offset 5999",
        {"arrivals.window": {"from": "2s", "to": "6s"}, "phases.measure": "4s"},
    ),
    "aiperf_trace_of_n": Line(
        AIPERF_HELP,
        A + "--input-file t.jsonl --custom-dataset-type mooncake_trace --request-count 30",
        {"arrivals.kind": "trace", "command": "--num-prompts 30"},
    ),
    "aiperf_single_turn": Line(
        AIPERF_HELP,
        A + "--input-file q.jsonl --custom-dataset-type single_turn --concurrency 2",
        {"prompts": {"kind": "dataset", "path": "q.jsonl"}, "arrivals.users": 2},
    ),
    "aiperf_speedup": Line(
        AIPERF_HELP,
        A + "--input-file t.jsonl --custom-dataset-type bailian_trace --replay-speedup 4",
        {"arrivals": {"kind": "trace", "path": "t.jsonl", "time_scale": 0.25}},
    ),
    "aiperf_sequence_distribution": Line(
        AIPERF_HELP,
        A + "--request-rate 2 --sequence-distribution '128,64:25;512|20,128|5:75'",
        {
            "classes.pair1_128_64.weight": 25,
            "classes.pair1_128_64.requests.input_tokens.tokens": 128,
            "classes.pair2_512_128.requests.input_tokens.sd": 20,
            "classes.pair2_512_128.requests.output_tokens.mean": 128,
            "requests": None,
        },
    ),
    "aiperf_seq_dist_brackets": Line(
        AIPERF_HELP,
        A + "--request-rate 2 --seq-dist '[(256,128):40,(512,256):60]' --prefix-prompt-length 99",
        {
            "classes.pair1_256_128.weight": 40,
            "classes.pair2_512_256.requests.shared_prefix.tokens": 99,
        },
    ),
    "aiperf_range_ratio": Line(
        AIPERF_HELP,
        A + "--request-rate 2 --isl 1000 --random-range-ratio 0.25",
        {"requests.input_tokens": {"kind": "uniform", "min": 750, "max": 1250}},
    ),
    "aiperf_sweep": Line(
        AIPERF_HELP,
        A + "--concurrency 10,20,40",
        {"command": "--over arrivals.users=10,20,40", "arrivals.users": 10},
    ),
    "aiperf_extra_inputs": Line(
        AIPERF_HELP,
        A + "--request-rate 1 --extra-inputs temperature:0.5 top_p:0.9 ignore_eos:true -v",
        {"requests.temperature": 0.5, "target.extra_body": {"top_p": 0.9}},
    ),
    "aiperf_warmup": Line(
        AIPERF_HELP,
        A + "--request-rate 4 --warmup-request-count 20 --benchmark-duration 30",
        {"phases": {"warmup": "5s", "measure": "30s"}},
    ),
    "aiperf_public_dataset": Line(
        AIPERF_HELP,
        A + "--public-dataset sharegpt --num-sessions 50",
        {},
        ("--public-dataset sharegpt", "--num-sessions 50"),
    ),
    "aiperf_recipe": Line(
        AIPERF_HELP,
        A + "--search-recipe max-throughput-ttft-sla --ttft-sla-ms 200",
        {},
        ("--search-recipe max-throughput-ttft-sla", "--ttft-sla-ms 200"),
    ),
    "aiperf_pattern_without_a_rate": Line(
        AIPERF_HELP,
        A + "--concurrency 2 --request-count 9 --arrival-pattern gamma --arrival-smoothness 2.0",
        {"arrivals.users": 2, "phases.requests": 9},
        ("--arrival-pattern gamma", "--arrival-smoothness 2"),
    ),
    "aiperf_smoothness_of_poisson": Line(
        AIPERF_HELP,
        A + "--request-rate 2 --request-count 9 --arrival-smoothness 2.0",
        {"arrivals": {"kind": "poisson", "rate": "2/s"}},
        ("--arrival-smoothness 2",),
    ),
    # genai-perf
    "genai_chat": Line(
        GENAI_ARGS,
        "genai-perf profile -m m --endpoint-type chat --url localhost:8000 --streaming "
        "--synthetic-input-tokens-mean 200 --synthetic-input-tokens-stddev 0 "
        "--output-tokens-mean 100 --output-tokens-mean-deterministic --concurrency 4 "
        "--measurement-interval 10000",
        {
            "arrivals.users": 4,
            "requests.input_tokens.tokens": 200,
            "requests.output_tokens.tokens": 100,
            "phases.measure": "10s",
        },
    ),
    "genai_rate_is_constant": Line(
        GENAI_ARGS,
        "genai-perf profile -m m --endpoint-type completions --osl 9 --request-rate 3 -- -v "
        "--max-threads=256",
        {"arrivals": {"kind": "constant", "rate": "3/s"}, "target.api": "completions"},
        ("--max-threads=256",),
    ),
    "genai_backend_of_triton": Line(
        GENAI_ARGS,
        "genai-perf profile -m m --endpoint-type chat --service-kind openai --backend vllm "
        "--streaming --osl 9 --concurrency 2",
        {"arrivals.users": 2},
        ("--backend vllm",),
    ),
    "genai_payload": Line(
        GENAI_README,
        "genai-perf profile --tokenizer t -m t --endpoint-type chat --url http://localhost:8000 "
        "--streaming --input-file payload:trace.jsonl",
        {"arrivals": {"kind": "trace", "path": "trace.jsonl"}},
    ),
    # evalscope
    "evalscope_parallel": Line(
        EVALSCOPE,
        E + "--parallel 1 10 50 --number 10 100 500 --dataset random --min-prompt-length 512 "
        "--max-prompt-length 1024 --prefix-length 64 --max-tokens 128 --min-tokens 128 "
        "--tokenizer-path /t --seed 7 --stream --outputs-dir o",
        {
            "arrivals.users": 1,
            "requests.input_tokens": {"kind": "uniform", "min": 512, "max": 1024},
            "requests.output_tokens.tokens": 128,
            "requests.shared_prefix.tokens": 64,
            "phases.requests": 10,
            "seed": 7,
            "command": "slobench sweep scenario.yaml --target "
            "http://127.0.0.1:8000/v1/chat/completions --model m --over arrivals.users=1,10,50",
        },
        ("--number 100", "--number 500"),
    ),
    "evalscope_rate": Line(
        EVALSCOPE,
        E + "--rate 5 --parallel 20 -n 300 --dataset openqa --dataset-path q.jsonl "
        """--max-tokens 64 --extra-args '{"ignore_eos": true, "top_k": 4}' --temperature 0.6""",
        {
            "arrivals": {"kind": "poisson", "rate": "5/s"},
            "prompts": {"kind": "dataset", "path": "q.jsonl"},
            "limits": {"max_concurrency": 20, "when_full": "wait"},
            "phases.requests": 300,
            "requests.temperature": 0.6,
            "target": {
                "url": "http://127.0.0.1:8000/v1/chat/completions",
                "api": "chat",
                "extra_body": {"top_k": 4},
            },
        },
    ),
    "evalscope_open_loop": Line(
        EVALSCOPE,
        "evalscope perf --model m --base-url http://h/v1 --protocol openai_completions --mode "
        "open_loop --request-rate 2 --arrival constant --max-outstanding 64 --duration 30 "
        "--workload line_by_line --workload-path p.txt --max-tokens 32",
        {
            "arrivals": {"kind": "constant", "rate": "2/s"},
            "limits.max_concurrency": 64,
            "prompts": {"kind": "dataset", "path": "p.txt", "format": "lines"},
            "phases": {"requests": 1000, "at_most": "30s"},
            "target": {
                "url": "http://h/v1",
                "api": "completions",
                "extra_body": {"ignore_eos": None, "min_tokens": None},
            },
        },
    ),
    "evalscope_download": Line(
        EVALSCOPE,
        E + "--rate 3 --dataset openqa --warmup-num 5 --no-stream",
        {"arrivals.rate": "3/s"},
        ("--dataset openqa", "--warmup-num 5", "--no-stream"),
    ),
    # genai-bench
    "genai_bench_default": Line(
        GENAI_BENCH,
        B + "--traffic-scenario 'D(100,1000)' --num-concurrency 8 --num-concurrency 16 "
        "--max-time-per-run 5 --max-requests-per-run 200 --model-tokenizer /t "
        "--server-engine vLLM --num-workers 4",
        {
            "arrivals.users": 8,
            "requests.input_tokens.tokens": 100,
            "requests.output_tokens.tokens": 1000,
            "phases": {"requests": 200, "at_most": "5m"},
            "command": "sweep scenario.yaml --target http://h:8000 --model m "
            "--over arrivals.users=8,16",
        },
    ),
    "genai_bench_normal": Line(
        GENAI_BENCH,
        B + "--traffic-scenario 'N(480,240)/(300,150)' --traffic-scenario 'U(50,100)/(200,250)' "
        "--num-concurrency 4 --max-time-per-run 30s --max-requests-per-run 9 --warmup-ratio 0.1 "
        """--additional-request-params '{"temperature": 0.5}'""",
        {
            "requests.input_tokens.mean": 480,
            "requests.output_tokens.sd": 150,
            "requests.temperature": 0.5,
            "phases.at_most": "30s",
        },
        ("--traffic-scenario U(50,100)/(200,250)", "--warmup-ratio 0.1"),
    ),
    "genai_bench_uniform": Line(
        GENAI_BENCH,
        B + "--traffic-scenario 'U(100,200)' --num-concurrency 1 --max-requests-per-run 9",
        {
            "requests.input_tokens": {"kind": "uniform", "min": 1, "max": 100},
            "requests.output_tokens": {"kind": "uniform", "min": 1, "max": 200},
        },
    ),
    "genai_bench_dataset": Line(
        GENAI_BENCH,
        "genai-bench benchmark --api-backend azure-openai --task text-to-text "
        "--azure-endpoint https://r.openai.azure.com --azure-deployment d "
        "--azure-api-version 2024-10-21 --api-model-name m --model-api-key secret "
        "--traffic-scenario dataset --dataset-path p.csv --num-concurrency 2 "
        "--max-requests-per-run 9",
        {
            "prompts": {"kind": "dataset", "path": "p.csv"},
            "command": "https://r.openai.azure.com/openai/deployments/d?api-version=2024-10-21",
        },
        ("--model-api-key …",),
    ),
    # llmperf
    "llmperf_openai": Line(
        LLMPERF_README,
        """export OPENAI_API_KEY=secret_abcdefg
        export OPENAI_API_BASE="https://api.example/v1"
        """
        + L
        + "--mean-input-tokens 550 --stddev-input-tokens 150 --mean-output-tokens 150 "
        "--stddev-output-tokens 10 --max-num-completed-requests 2 --timeout 600 "
        "--num-concurrent-requests 1 --results-dir out --llm-api openai "
        "--additional-sampling-params '{}'",
        {
            "arrivals": {"kind": "users", "users": 1, "think": {"kind": "fixed", "duration": "0s"}},
            "requests.input_tokens.sd": 150,
            "requests.output_tokens.mean": 150,
            "phases": {"requests": 2, "at_most": "10m"},
            "command": "--target https://api.example/v1",
        },
    ),
    "llmperf_defaults": Line(
        LLMPERF_README,
        L + """--additional-sampling-params '{"temperature": 0.3, "top_p": 0.5}'""",
        {
            "arrivals.users": 10,
            "requests.output_tokens.sd": 80,
            "requests.temperature": 0.3,
            "target.extra_body": {"top_p": 0.5},
            "phases": {"requests": 10, "at_most": "90s"},
        },
    ),
    # inference-perf
    "inference_perf_poisson": Line(
        INFERENCE_PERF,
        P + PD + "load: {type: poisson, stages: [{rate: 4, duration: 30}]}\napi: {type: chat}\n",
        {
            "arrivals": {"kind": "poisson", "rate": "4/s"},
            "phases.measure": "30s",
            "requests.input_tokens": {
                "kind": "normal",
                "mean": 50,
                "sd": 10,
                "min": 10,
                "max": 100,
            },
            "requests.output_tokens.tokens": 20,
            "command": "--target http://h:8000 --model m",
        },
    ),
    "inference_perf_stages": Line(
        INFERENCE_PERF,
        P + PD + "load:\n  type: constant\n  interval: 5\n  stages:\n"
        "  - {rate: 1, duration: 30}\n  - {rate: 2, duration: 40}\n  - {rate: 4, duration: 10}\n",
        {
            "arrivals": {
                "kind": "steps",
                "levels": [
                    {"rate": "1/s", "for": "30s"},
                    {"rate": "0/s", "for": "5s"},
                    {"rate": "2/s", "for": "40s"},
                    {"rate": "0/s", "for": "5s"},
                    {"rate": "4/s", "for": "10s"},
                ],
            },
            "phases.measure": "90s",
        },
    ),
    "inference_perf_concurrent": Line(
        INFERENCE_PERF,
        P + PD + "load:\n  type: concurrent\n  lora_traffic_split: [{name: a, split: 1.0}]\n"
        "  stages: [{num_requests: 20, concurrency_level: 4}, {num_requests: 40, "
        "concurrency_level: 8}]\n",
        {"arrivals.users": 4, "command": "--over arrivals.users=4,8"},
        ("lora_traffic_split",),
    ),
    "inference_perf_trace": Line(
        INFERENCE_PERF,
        P + "data: {type: random}\nload:\n  type: trace_replay\n"
        "  trace: {file: azure.csv, format: AzurePublicDataset}\n",
        {"arrivals": {"kind": "trace", "path": "azure.csv", "format": {"kind": "azure"}}},
    ),
    "inference_perf_prefix": Line(
        INFERENCE_PERF,
        P + "data:\n  type: shared_prefix\n  shared_prefix: {num_groups: 3, "
        "num_prompts_per_group: 9, system_prompt_len: 70, question_len: 20, output_len: 30}\n"
        "load: {type: poisson, stages: [{rate: 1, duration: 9}]}\ncircuit_breakers: []\n",
        {
            "requests.shared_prefix": {"tokens": 70, "groups": 3},
            "requests.input_tokens.tokens": 20,
            "requests.output_tokens.tokens": 30,
        },
    ),
}


def value_at(document, path):
    for key in path.split("."):
        if document is None:
            return None
        document = document[int(key)] if isinstance(document, list) else document.get(key)
    return document


@pytest.mark.parametrize("name", LINES)
def test_a_command_of_the_documents_becomes_its_scenario(name, tmp_path):
    line = LINES[name]
    found = translate(line.command)
    path = tmp_path / "scenario.yaml"
    path.write_text(found.scenario_yaml)
    load_scenario(path)
    document = yaml.safe_load(found.scenario_yaml)
    document["target"] = yaml.safe_load(found.target_yaml or "{}")
    for key, value in line.holds.items():
        if key == "command":
            assert str(value) in found.command
        else:
            assert value_at(document, key) == value, f"{key} in\n{found.scenario_yaml}"
    for text in line.named:
        assert any(text in missing for missing in found.missing), found.missing
    assert "verysecret" not in repr(found)


def test_there_are_sixty_lines_with_a_source():
    assert len(LINES) >= 60
    assert all(line.source for line in LINES.values())


@pytest.mark.parametrize("name", [n for n, line in LINES.items() if "load:" not in line.command])
def test_an_unknown_flag_is_always_named(name):
    command = LINES[name].command
    flag = " --no-such-flag 17"
    command = command.replace(" -- ", f"{flag} -- ") if " -- " in command else command + flag
    found = translate(command)
    assert any("--no-such-flag 17" in line for line in found.missing)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("genai-perf profile -m gpt2 --backend tensorrtllm --streaming", "kserve"),
        ("genai-perf profile -m gpt2 --service-kind triton --backend tensorrtllm", "kserve"),
        (L + "--llm-api anthropic", "OpenAI's API only"),
        (S + "--backend trt", "chat and completions only"),
        (G + "--profile kind=replay" + GD, "trace_synthetic"),
        (V + "--ramp-up-strategy linear --ramp-up-start-rps 0 --ramp-up-end-rps 5", "above 0"),
        (V + "--extra-body '{'", "is not JSON"),
        (V + "--backend openai-embeddings-chat", "not chat messages"),
        (V + "--backend openai-audio --endpoint /v1/audio/transcriptions", "embeddings, rerank"),
        (V + "--backend tgi --endpoint /generate_stream", "responses, completions only"),
        (V + "--dataset-name random-mm --random-mm-base-items-per-request 2", "sends text"),
        (V + "--dataset-name hf --dataset-path lmarena-ai/VisionArena-Chat", "sends text"),
        (V + "--random-mm-num-mm-items-range-ratio 0.5", "sends text only"),
        (S + "--backend sglang --dataset-name image --image-count 2", "sends text"),
        (A + "--user-centric-rate 2 --num-users 10", "--users 10 --think 5s"),
        (A + "--image-width-mean 512 --image-height-mean 512", "sends text only"),
        (A + "--input-file c.jsonl --custom-dataset-type multi_turn", "session"),
        (E + "--dataset flickr8k", "images"),
        (E + "--dataset random", "expected --max-prompt-length"),
        (E.replace("api openai", "api embedding"), "chat and completions only"),
        (E + "--multi-turn", "session"),
        (E + "--sla-auto-tune", "slobench capacity"),
        (E + "--open-loop", "needs --rate"),
        (B.replace("text-to-text", "image-text-to-text"), "sends text"),
        (B.replace("vllm", "aws-bedrock"), "chat and completions only"),
        (B + "--traffic-scenario 'I(512,512)'", "knows D"),
        ("k6 run --vus 10 script.js", "docs/coming-from-k6.md"),
        ("locust -f locustfile.py --headless -u 10", "docs/coming-from-locust.md"),
        ("python -m locust -f locustfile.py", "docs/coming-from-locust.md"),
        (P + "data: {type: otel_trace_replay}\nload: {type: constant}\n", "no text of single"),
        (P + PD + "api: {type: embeddings}\n", "completions and responses only"),
        ("inference-perf --log-level INFO", "flags such as --server.base_url"),
        (V + "--dataset-name spec_bench --dataset-path q.jsonl --num-prompts -1", "above 0"),
        (A + "--seq-dist 'nonsense'", "ISL,OSL:PERCENT"),
        ("inference-perf --config_file no/such.yml", "cannot be read"),
        (P + PD + "load: {type: trace_session_replay}\n", "no equivalent is known"),
    ],
)
def test_a_command_without_an_equivalent_is_rejected_with_the_reason(command, message):
    with pytest.raises(UsageError, match=message):
        translate(command)


@pytest.mark.parametrize("name", ["vllm_linear_ramp", "vllm_exponential_ramp", "vllm_bursty_ramp"])
def test_a_ramp_sends_its_prompts_in_the_time_that_the_gaps_of_vllm_take(name, tmp_path):
    path = tmp_path / "scenario.yaml"
    path.write_text(translate(LINES[name].command).scenario_yaml)
    scenario = load_scenario(path)
    ratio, is_linear = 10.0, "linear" in LINES[name].command
    progress = [index / 299 for index in range(300)]
    gaps_s = [1 / (1 + 9 * p if is_linear else ratio**p) for p in progress]
    assert scenario.phases.requests == 300
    over_s = sum(gaps_s)
    assert scenario.arrivals is not None
    rate_per_s = scenario.arrivals.mean_rate_per_s(over_s)
    assert rate_per_s is not None
    assert rate_per_s * over_s == pytest.approx(300, rel=0.02)
    times_s = make_schedule(scenario)["scheduled_s"]
    assert len(times_s) == 300
    assert float(times_s[-1]) == pytest.approx(over_s, rel=0.4)  # random: 300 gaps


@pytest.mark.parametrize("tool", ["aiperf", "genai-perf"])
def test_answers_that_do_not_stream_are_noted(tool):
    command = f"{tool} profile -m m --endpoint-type chat --osl 9 --concurrency 2"
    assert any("without --streaming" in note for note in translate(command).notes)
    assert not any("streaming" in note for note in translate(command + " --streaming").notes)


def test_inference_perf_reads_its_configuration_file(tmp_path):
    path = tmp_path / "config.yml"
    path.write_text(P + PD + "load: {type: poisson, stages: [{rate: 4, duration: 30}]}\n")
    found = translate(f"inference-perf --config_file {path}")
    assert yaml.safe_load(found.scenario_yaml)["arrivals"] == {"kind": "poisson", "rate": "4/s"}


def test_inference_perf_is_read_from_flags_over_its_file(tmp_path):
    path = tmp_path / "config.yml"
    path.write_text(P + PD + "load: {type: poisson, stages: [{rate: 4, duration: 30}]}\n")
    flags = (
        "--server.base_url http://other:1 --load.stages '[{rate: 7, duration: 9}]' "
        "--load.num-workers=3 --api.type chat"
    )
    found = translate(f"inference-perf -c {path} {flags}")
    scenario = yaml.safe_load(found.scenario_yaml)
    assert scenario["arrivals"] == {"kind": "poisson", "rate": "7/s"}
    assert scenario["phases"] == {"measure": "9s"}
    assert found.command == "slobench run scenario.yaml --target http://other:1 --model m"
    assert found.missing == ()
    alone = translate(
        "inference-perf --server.base_url=http://h:8000 --server.model_name m --api.type chat "
        "--data.type random --data.input_distribution.min 10 --data.input_distribution.max 10 "
        "--load.type concurrent --load.stages '[{concurrency_level: 4, num_requests: 20}]'"
    )
    values = yaml.safe_load(alone.scenario_yaml)
    assert (values["arrivals"]["users"], values["phases"]["requests"]) == (4, 20)
    assert values["requests"]["input_tokens"] == {"kind": "fixed", "tokens": 10}
