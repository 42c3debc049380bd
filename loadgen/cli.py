"""The command line. Each verb parses, calls one function and chooses an exit code; no logic here.

Exit codes: 0 met · 1 missed · 2 usage or scenario error · 3 no verdict · 4 internal error ·
130 interrupted. Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from loadgen import command

app = typer.Typer(
    name="slobench",
    help="How much of this traffic can this LLM server take before it breaks its latency promise?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_MEASURE, _DECIDE, _LAB, _EXTEND = "Measure", "Decide", "Engine lab", "Extend"

Scenario = Annotated[
    str | None,
    typer.Argument(help="A scenario file or the name of a shipped one (see `slobench list`)."),
]
Rate = Annotated[str | None, typer.Option(help="Poisson arrivals per second, e.g. 8/s.")]
InputLen = Annotated[int | None, typer.Option(help="Prompt tokens of each request.")]
OutputLen = Annotated[int | None, typer.Option(help="Output tokens of each request.")]
Duration = Annotated[str | None, typer.Option(help="Length of the measured window, e.g. 60s.")]
Warmup = Annotated[str | None, typer.Option(help="Uncounted time before it, e.g. 5s.")]
Concurrency = Annotated[int | None, typer.Option(help="Requests in flight at most.")]
Slo = Annotated[
    list[str] | None, typer.Option(help="A promise, e.g. 'p99(ttft)<=500ms'; repeatable.")
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(help="Promises as vLLM writes them, e.g. 'ttft:500 tpot:50' (ms, from send)."),
]
Seed = Annotated[int | None, typer.Option(help="Another seed draws another schedule.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change one scenario key, e.g. arrivals.rate=9/s; repeatable."),
]
Plugin = Annotated[
    list[Path] | None, typer.Option(help="A Python file that registers kinds; repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
Confidence = Annotated[
    float | None, typer.Option(help="Ask for proof: a verdict the interval straddles is none.")
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slobench {command.version()}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(
    rich_help_panel=_MEASURE,
    epilog="Example: slobench run scenarios/quickstart.yaml --target reference",
)
def run(
    scenario: Scenario = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="A URL, a target file, `reference` (the bundled engine), `sim` (the same in "
            "virtual time) or `mock`. "
            "Default: the environment's OPENAI_BASE_URL."
        ),
    ] = None,
    rate: Rate = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    duration: Duration = None,
    warmup: Warmup = None,
    max_concurrency: Concurrency = None,
    slo: Slo = None,
    goodput: Goodput = None,
    seed: Seed = None,
    set_: Set = None,
    model: Annotated[
        str, typer.Option(help="The API's model field. Default: from /v1/models.")
    ] = "",
    engine: Annotated[
        str,
        typer.Option(
            help="Settings of `reference`, `sim` or `mock`, e.g. mode=chunked,shape=tiny."
        ),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="The run's directory. Default: runs/<scenario>-<time>.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the run in --out.")] = False,
    workers: Annotated[
        str, typer.Option(help="Load-generating processes, or auto: by the asked token rate.")
    ] = "auto",
    transport: Annotated[
        str, typer.Option(help="fast, or aiohttp: plain, slower, to check the fast one by.")
    ] = "fast",
    confidence: Confidence = None,
    plugin: Plugin = None,
    print_scenario: Annotated[
        bool, typer.Option("--print-scenario", help="Print the scenario as YAML and stop.")
    ] = False,
    print_launch: Annotated[
        bool,
        typer.Option("--print-launch", help="Print the target file's server command and stop."),
    ] = False,
    scrape: Annotated[
        bool, typer.Option("--scrape/--no-scrape", help="Read the server's own metrics at 1 Hz.")
    ] = True,
    json: Json = False,
) -> None:
    """Fire a scenario at a target, measure every token, and say whether the promise was kept."""
    if print_launch:
        command.print_launch(target)
        return
    chosen = command.choose_scenario(
        scenario, set_ or [], plugin or [], rate=rate, input_len=input_len, output_len=output_len,
        duration=duration, warmup=warmup, max_concurrency=max_concurrency, seed=seed,
        slo=command.promises(slo, goodput),
    )  # fmt: skip
    if print_scenario:
        typer.echo(chosen.to_yaml(), nl=False)
        return
    exit_code = command.run(
        chosen, target, model, engine, out, force, workers, transport, confidence, plugin or [],
        json, scrape,
    )  # fmt: skip
    raise typer.Exit(exit_code)


@app.command(rich_help_panel=_MEASURE, epilog="Example: slobench preview quickstart")
def preview(
    scenario: Scenario = None,
    rate: Rate = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    duration: Duration = None,
    warmup: Warmup = None,
    max_concurrency: Concurrency = None,
    slo: Slo = None,
    seed: Seed = None,
    set_: Set = None,
    plugin: Plugin = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with the arrivals and the lengths.")
    ] = None,
    parquet: Annotated[Path | None, typer.Option(help="Write the schedule as a table.")] = None,
    json: Json = False,
) -> None:
    """Show what a scenario would send, and what its promises need to be proven. No network."""
    chosen = command.choose_scenario(
        scenario, set_ or [], plugin or [], rate=rate, input_len=input_len, output_len=output_len,
        duration=duration, warmup=warmup, max_concurrency=max_concurrency, slo=slo, seed=seed,
    )  # fmt: skip
    command.preview(chosen, json, html, parquet)


@app.command(rich_help_panel=_MEASURE, epilog="Example: slobench validate scenarios/*.yaml")
def validate(
    scenarios: Annotated[
        list[str] | None, typer.Argument(help="Scenario files or names of shipped ones.")
    ] = None,
    set_: Set = None,
    plugin: Plugin = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the format's JSON schema, for editors.")
    ] = False,
) -> None:
    """Check scenarios without running them: every mistake with file, line and key."""
    if schema:
        command.schema(plugin or [])
        return
    raise typer.Exit(command.validate(scenarios or [], set_ or [], plugin or []))


@app.command(rich_help_panel=_MEASURE, epilog="Example: slobench fit trace.csv > scenario.yaml")
def fit(
    trace: Annotated[Path, typer.Argument(help="A recorded trace; see `slobench list traces`.")],
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="A format's name, or '{kind: columns, time: …, input_tokens: …, "
            "output_tokens: …}'.",
        ),
    ] = "auto",
    json: Json = False,
) -> None:
    """Propose a scenario that looks like a recorded trace, and show how well it does."""
    command.fit(trace, format_, json)


@app.command(
    rich_help_panel=_MEASURE,
    epilog="Example: slobench doctor --target http://localhost:8000",
)
def doctor(
    target: Annotated[
        str | None,
        typer.Option(help="Examine a server: a URL, a target file, `reference` or `mock`."),
    ] = None,
    prove: Annotated[
        bool,
        typer.Option("--prove", help="Hold our numbers against a truth server in C (needs cc)."),
    ] = False,
    budget: Annotated[str, typer.Option(help="Time for the search or the proof.")] = "60s",
    model: Annotated[
        str, typer.Option(help="With --target: the API's model field. Default: from /v1/models.")
    ] = "",
    engine: Annotated[
        str, typer.Option(help="With --target reference or mock: its settings.")
    ] = "",
    json: Json = False,
) -> None:
    """Tell how much load this machine can measure truly, or whether a server is fit for it."""
    raise typer.Exit(command.doctor(target, prove, budget, model, engine, json))


@app.command(rich_help_panel=_MEASURE, epilog="Example: slobench init my-load-test")
def init(
    directory: Annotated[Path, typer.Argument(help="Where the files go.")] = Path(),
) -> None:
    """Write a scenario, a target file and a CI workflow to begin with; overwrites nothing."""
    command.init(directory)


@app.command(rich_help_panel=_MEASURE, epilog="Example: slobench report runs/latest")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    slo: Slo = None,
    confidence: Confidence = None,
    json: Json = False,
) -> None:
    """Compute the numbers of recorded runs again and write their report.html anew."""
    command.report(runs, slo, confidence, json)


@app.command(
    rich_help_panel=_DECIDE,
    epilog="Example: slobench rescore runs/latest --slo 'ttft<=300ms' --definition all",
)
def rescore(
    run: Annotated[Path, typer.Argument(help="A run directory; its files stay as they are.")],
    slo: Slo = None,
    goodput: Goodput = None,
    definition: Annotated[
        list[str] | None,
        typer.Option(help="vllm, guidellm, aiperf, inference-perf, mlperf or all; repeatable."),
    ] = None,
    window: Annotated[
        str | None, typer.Option(help="Another measured window: 30s:90s, or steady (MSER-5).")
    ] = None,
    confidence: Confidence = None,
    json: Json = False,
) -> None:
    """Judge a recorded run by other promises, another window or another tool's definitions."""
    asked = command.promises(slo, goodput)
    raise typer.Exit(command.rescore(run, asked, definition or [], window, confidence, json))


@app.command(
    rich_help_panel=_DECIDE,
    epilog="Example: slobench compare runs/before runs/after --html comparison.html",
)
def compare(
    sides: Annotated[
        list[str],
        typer.Argument(
            metavar="A B",
            help="Two sides: each a run, runs separated by commas, or a folder of runs.",
        ),
    ],
    aa: Annotated[
        bool, typer.Option("--aa", help="All runs are equal: measure what they differ by.")
    ] = False,
    fail_on: Annotated[
        str,
        typer.Option(help="Exit code 1 for worse; 3 for `inconclusive` (or invalid), `invalid`."),
    ] = "worse",
    metric: Annotated[
        list[str] | None,
        typer.Option(help="A measure that decides, e.g. 'p99(ttft)'; repeatable."),
    ] = None,
    margin: Annotated[
        list[str] | None,
        typer.Option(help="What difference is none: 5% or 'p99(ttft)=10%'; repeatable."),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Of intervals and verdicts.")] = 0.95,
    effect: Annotated[
        str | None, typer.Option(help="Plan the runs needed for a change this large, e.g. 5%.")
    ] = None,
    noise: Annotated[
        Path | None, typer.Option(help="What `compare --aa RUNS --json` wrote before.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="A key that may differ although it must agree, e.g. gpu; repeatable."),
    ] = None,
    within_run: Annotated[
        bool, typer.Option("--within-run", help="Take two single runs as all there is.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the distributions.")] = None,
    json: Json = False,
) -> None:
    """Say whether B is better, worse or the same as A, and how sure that is."""
    raise typer.Exit(
        command.compare(
            sides, aa, fail_on, metric or [], margin or [], confidence, effect, noise,
            vary or [], within_run, html, json,
        )
    )  # fmt: skip


@app.command(
    rich_help_panel=_LAB, epilog="Example: slobench serve --mode chunked --shape tiny --port 8000"
)
def serve(
    mode: Annotated[
        str, typer.Option(help="The batching mode; `slobench list modes` has them all.")
    ] = "chunked",
    shape: Annotated[
        str, typer.Option(help="A random-weight shape, or a local model directory.")
    ] = "tiny",
    device: Annotated[
        str, typer.Option(help="cpu (torch), sim (steps only take time), or toy (for tests).")
    ] = "cpu",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    threads: Annotated[int, typer.Option(help="torch threads.")] = 1,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens per sequence at most.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences per step at most.")] = None,
    token_budget: Annotated[
        str | None, typer.Option(help="Tokens per step at most, or slo (chunked); else the mode's.")
    ] = None,
    kv_blocks: Annotated[int | None, typer.Option(help="KV blocks of 16 tokens.")] = None,
    max_queue: Annotated[
        int | None, typer.Option(help="Waiting requests at most; further ones get 429.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random weights.")] = None,
    model_name: Annotated[str | None, typer.Option(help="The model id to answer to.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the API key to ask for.")
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Where the step and event logs go (Parquet).")
    ] = None,
    drain: Annotated[
        str | None, typer.Option(help="What running requests get at SIGTERM, e.g. 10s.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A knob of the mode or the device, key=value; repeatable."),
    ] = None,
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """Serve the bundled engine on the OpenAI API."""
    options: dict[str, Any] = {
        "mode": mode, "shape": shape, "device": device, "host": host, "port": port,
        "threads": threads, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs,
        "token_budget": token_budget, "kv_blocks": kv_blocks, "max_queue": max_queue,
        "seed": seed, "model_name": model_name, "api_key_env": api_key_env, "log_dir": log_dir,
    }  # fmt: skip
    given = {key: value for key, value in options.items() if value is not None}
    raise typer.Exit(command.serve(given, drain, set_ or [], plugin or [], json))


@app.command(
    rich_help_panel=_LAB,
    epilog="Example: slobench simulate chat_poisson --mode chunked --shape 8b --hardware h200",
)
def simulate(
    scenario: Scenario = None,
    mode: Annotated[str, typer.Option(help="The batching mode.")] = "chunked",
    shape: Annotated[str, typer.Option(help="A shape, or a local model directory.")] = "8b",
    hardware: Annotated[
        str, typer.Option(help="h200, h100, a100, several (4xh200), or cpu for a small shape.")
    ] = "h200",
    engine: Annotated[
        str, typer.Option(help="Further settings, e.g. token_budget=512,max_num_seqs=64.")
    ] = "",
    rate: Rate = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    duration: Duration = None,
    warmup: Warmup = None,
    max_concurrency: Concurrency = None,
    slo: Slo = None,
    seed: Seed = None,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's directory. Default: runs/<scenario>-<time>.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the run in --out.")] = False,
    confidence: Confidence = None,
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """Run a scenario in virtual time on a simulated engine: `run --target sim`, said shorter."""
    chosen = command.choose_scenario(
        scenario, set_ or [], plugin or [], rate=rate, input_len=input_len, output_len=output_len,
        duration=duration, warmup=warmup, max_concurrency=max_concurrency, slo=slo, seed=seed,
    )  # fmt: skip
    settings = f"mode={mode},shape={shape},hardware={hardware},{engine}"
    exit_code = command.run(
        chosen, "sim", "", settings, out, force, "auto", "fast", confidence, plugin or [], json
    )
    raise typer.Exit(exit_code)


@app.command(
    rich_help_panel=_LAB,
    epilog="Example: slobench modes long_prompt_interference --modes chunked,bucketed",
)
def modes(
    scenario: Scenario = None,
    modes: Annotated[
        str,
        typer.Option(help="The modes, e.g. static,continuous,chunked:token_budget=512."),
    ] = "static,continuous,prefill_first,chunked",
    rates: Annotated[
        str | None,
        typer.Option(help="Offered rates per second, from:to:step or a list: 2:20:2 or 2,4,8."),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Schedules per rate: the scenario's seed and the next ones.")
    ] = 1,
    target: Annotated[
        str, typer.Option(help="sim (virtual time), or reference: the real engine, mode by mode.")
    ] = "sim",
    engine: Annotated[
        str, typer.Option(help="Settings for every mode, e.g. shape=8b,hardware=h200.")
    ] = "",
    rate: Rate = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    duration: Duration = None,
    warmup: Warmup = None,
    max_concurrency: Concurrency = None,
    slo: Slo = None,
    seed: Seed = None,
    set_: Set = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the results go; one that was interrupted goes on from there."),
    ] = None,
    workers: Annotated[
        str, typer.Option(help="Simulating processes, or auto: one per core.")
    ] = "auto",
    confidence: Confidence = None,
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """Run the same requests against several batching modes and show them side by side."""
    chosen = command.choose_scenario(
        scenario, set_ or [], plugin or [], rate=rate, input_len=input_len, output_len=output_len,
        duration=duration, warmup=warmup, max_concurrency=max_concurrency, slo=slo, seed=seed,
    )  # fmt: skip
    raise typer.Exit(
        command.modes(
            chosen, modes, rates, seeds, target, engine, out, workers, confidence, plugin or [],
            json,
        )
    )  # fmt: skip


@app.command("list", rich_help_panel=_EXTEND, epilog="Example: slobench list arrivals")
def list_(
    family: Annotated[
        str | None, typer.Argument(help="One family: arrivals, lengths, apis, modes, scenarios, …")
    ] = None,
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """List the kinds that can be named in files and flags, with their parameters."""
    command.list_kinds(family, plugin or [], json)


@app.command(
    "from",
    rich_help_panel=_EXTEND,
    epilog="Example: slobench from 'vllm bench serve --model m --request-rate 8 --num-prompts 500'",
)
def from_(
    line: Annotated[
        str, typer.Argument(help="A command of vllm bench serve, guidellm or aiperf, in quotes.")
    ],
    json: Json = False,
) -> None:
    """Translate another tool's command line into a scenario and the command that runs it."""
    command.translate(line, json)


def main() -> None:
    """The console script: every way to fail is a line and an exit code, never a bare traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end like Ctrl-C: clean up, say so
    command.leave(command.guarded(app, os.environ))
