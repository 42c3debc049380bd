"""Other tools' command lines become scenarios that load, and what does not carry over is said."""

from pathlib import Path

import pytest

from loadgen.errors import UsageError
from loadgen.translate.command_line import translate
from loadgen.workload.scenario import load_scenario

GOLDEN = Path(__file__).parent / "golden" / "translations"
COMMANDS = {
    "vllm_random": """
        vllm bench serve --backend openai-chat --endpoint /v1/chat/completions \\
          --base-url http://127.0.0.1:8000 --model ref --tokenizer /tok --dataset-name random \\
          --random-input-len 256 --random-output-len 128 --ignore-eos --num-prompts 100 \\
          --request-rate 5 --burstiness 1.0 --temperature 0 --seed 1 \\
          --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,95,99 \\
          --goodput ttft:500 tpot:50 --save-result --save-detailed --result-filename out.json
    """,
    "vllm_bursty": """
        vllm bench serve --model m --request-rate=20 --burstiness 0.25 --num-prompts 2000 \\
          --random-input-len 1000 --random-range-ratio 0.2 --random-prefix-len 300 \\
          --max-concurrency 64 --num-warmups 10 --top-p 0.9 --lora-modules x
    """,
    "vllm_everything_at_once": "vllm bench serve --model m --num-prompts 500",
    "vllm_closed_loop": "vllm bench serve --model m --max-concurrency 32 --backend vllm",
    "vllm_ramp": """
        python benchmarks/benchmark_serving.py --model m --ramp-up-strategy linear
        --ramp-up-start-rps 1 --ramp-up-end-rps 9 --num-prompts 1000
    """,
    "vllm_sharegpt": """
        vllm bench serve --model m --dataset-name sharegpt --dataset-path sg.json --request-rate 4
    """,
    "vllm_sharegpt_output_len": """
        vllm bench serve --model m --dataset-name sharegpt --dataset-path sg.json --request-rate 4
          --sharegpt-output-len 20
    """,
    "vllm_two_ratios": """
        vllm bench serve --model m --request-rate 4 --random-input-len 1000
          --random-output-len 100 --random-range-ratio '{"input": 0.3, "output": 0.5}'
    """,
    "guidellm_sweep": """
        guidellm benchmark --target http://localhost:8000 --max-seconds 30
          --data prompt_tokens=256,output_tokens=128
    """,
    "guidellm_rates": """
        guidellm benchmark run --profile poisson --rate 1,2,4 --max-requests 200
          --data prompt_tokens=256,output_tokens=128
    """,
    "guidellm_streams": """
        guidellm benchmark run --profile concurrent --rate 1 8 --max-requests 200
          --data prompt_tokens=256,output_tokens=128
    """,
    "guidellm_poisson": """
        guidellm benchmark --target http://localhost:8000 --model m --rate-type poisson --rate 10
          --max-seconds 60 --random-seed 42 --output-path out.json
          --data "prompt_tokens=256,prompt_tokens_stdev=30,output_tokens=128"
    """,
    "guidellm_run": """
        guidellm run --backend kind=openai_http,target=http://127.0.0.1:9,model=ref
          --tokenizer kind=huggingface_auto,model=/tok
          --data kind=synthetic_text,prompt_tokens=256,output_tokens=128
          --profile kind=poisson,rate=5
          --constraint kind=max_duration,seconds=30 --output kind=json,path=out.json
          --disable-console-interactive
    """,
    "guidellm_concurrent": """
        guidellm benchmark run --rate-type concurrent --rate 16 --max-seconds 30
          --warmup-percent 0.1
          --data '{"prompt_tokens": 100, "output_tokens": 20, "turns": 3}'
    """,
    "aiperf_rate": """
        aiperf profile --model ref --url http://127.0.0.1:8000 --endpoint-type chat --streaming
          --tokenizer /tok --use-server-token-count --isl 256 --osl 128
          --extra-inputs ignore_eos:true --request-rate 5 --arrival-pattern poisson
          --request-count 100 --random-seed 1 --no-gpu-telemetry --ui-type none --artifact-dir out
          --goodput "time_to_first_token:500 inter_token_latency:15"
    """,
    "aiperf_concurrency": """
        aiperf profile -m ref -u localhost:8000 --endpoint-type completions --concurrency 10
          --request-count 100 --isl 512 --isl-stddev 50 --osl 64 --prefix-prompt-length 200
          --num-prefix-prompts 4 --api-key sk-verysecret --warmup-request-count 5
    """,
    "aiperf_trace": """
        aiperf profile --model m --input-file trace.jsonl --custom-dataset-type mooncake_trace
          --fixed-schedule --request-timeout-seconds 90
    """,
    "aiperf_agentx": """
        aiperf profile --scenario inferencex-agentx-mvp --url http://localhost:8000 --model m
          --endpoint-type chat --public-dataset semianalysis_cc_traces_weka_062126
          --concurrency 256 --benchmark-duration 900 --streaming --max-context-length 131072
          --system-idle-gap-cap-seconds 10.0 --trajectory-start-min-ratio 0.25
          --trajectory-start-max-ratio 0.75 --cache-bust first_turn_prefix
          --use-server-token-count --num-dataset-entries 393 --extra-inputs ignore_eos:true
    """,
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_becomes_this_scenario(name, check_golden, tmp_path):
    found = translate(COMMANDS[name])
    path = tmp_path / "scenario.yaml"
    path.write_text(found.scenario_yaml)
    load_scenario(path)
    parts = [found.scenario_yaml, found.target_yaml, found.command, *found.missing, *found.notes]
    check_golden(GOLDEN / f"{name}.txt", "\n".join(part for part in parts if part) + "\n")


def test_agentx_becomes_live_trees_of_agents():
    words = "aiperf profile --scenario agentx --streaming --input-file traces/weka --concurrency"
    found = translate(f"{words} 8")
    agents = "agents:\n  path: traces/weka\n  idle_cap: {at_most: 5m}\n"
    assert agents in found.scenario_yaml
    assert "users: 8" in found.scenario_yaml
    assert "phases: {measure: 1h}" in found.scenario_yaml
    assert found.missing == ()
    assert "--over arrivals.users=8,16" in translate(f"{words} 8,16").command


def test_a_key_on_the_command_line_is_not_repeated():
    found = translate(COMMANDS["aiperf_concurrency"])
    assert "verysecret" not in repr(found)
    assert any("api_key_env" in line for line in found.missing)


def test_a_temperature_that_the_server_would_choose_is_named():
    note = "without --temperature vLLM leaves the temperature to the server; slobench sends 0"
    command = "vllm bench serve --model m --request-rate 1"
    assert any(line.startswith(note) for line in translate(command).notes)
    chosen = translate(f"{command} --temperature 0")
    assert not any("temperature" in line for line in chosen.notes)


def test_a_command_for_embeddings_becomes_a_target_of_that_api():
    command = (
        "vllm bench serve --backend openai-embeddings --endpoint /v1/embeddings --model m "
        "--dataset-name random --random-input-len 64 --random-batch-size 8 --request-rate 5 "
        "--num-prompts 100 --goodput e2el:200"
    )
    found = translate(command)
    assert "api: embeddings" in found.target_yaml
    assert "texts_per_request: 8" in found.target_yaml
    assert "input_tokens: {kind: fixed, tokens: 512}" in found.scenario_yaml
    assert "output_tokens: {kind: fixed, tokens: 1}" in found.scenario_yaml
    assert (found.missing, found.notes) == ((), ())
    reranked = translate(command.replace("openai-embeddings", "vllm-rerank").replace(
        "/v1/embeddings", "/v1/rerank"))  # fmt: skip
    assert "api: rerank" in reranked.target_yaml
    ranged = translate(f"{command} --random-range-ratio 0.5")
    assert "{kind: uniform, min: 256, max: 768}" in ranged.scenario_yaml


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("vllm bench serve --backend vllm-pooling", "supports embeddings, rerank, chat"),
        ("wrk -t2 http://localhost", "no known command in 'wrk -t2"),
        (
            "guidellm benchmark --rate-type throughput --data prompt_tokens=1,output_tokens=1",
            "choose how many",
        ),
        ("guidellm benchmark --rate-type poisson", "needs --rate"),
        ("guidellm benchmark --rate-type poisson --rate 1 fast", "cannot be read"),
        ("aiperf profile --endpoint-type embeddings", "chat, completions and responses only"),
        ("aiperf profile --scenario chat", "--scenario chat: not translated.*inferencex-agentx"),
        ("vllm bench serve --request-rate fast", "--request-rate fast: expected a number"),
        ("vllm bench serve --request-rate 0", "a rate of 0 per second cannot be scheduled"),
        ("vllm bench serve --goodput itl:5", "expected ttft:MS"),
        ("python -m sglang.bench_serving --goodput itl:5", "expected ttft:MS"),
        ("vllm bench serve --model", "--model has no value"),
        ("vllm bench serve lonely", "belongs to no flag"),
        ("vllm bench serve --model 'm", "cannot be read"),
        ("vllm bench serve --temperature 9", "temperature"),
    ],
)
def test_what_has_no_meaning_is_refused_with_the_reason(command, message):
    with pytest.raises(UsageError, match=message):
        translate(command)
