"""`python -m reference_engine`: serve a model from the command line."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from loadgen.errors import SlobenchError
from loadgen.system.plugins import load_plugin
from reference_engine.serve import run
from reference_engine.serving.serve_options import ServeOptions, choose

_HELP = {
    "mode": "batching mode",
    "shape": "random-weight shape (nano, tiny, 10m, 110m, …) or a local model directory",
    "device": "cpu (torch), cuda (torch on a GPU), toy (deterministic tokens, no torch) or "
    "sim (no computation, steps only take time)",
    "threads": "threads for torch",
    "host": "address to listen on",
    "port": "port to listen on; 0 takes a free port, which READY shows",
    "max_model_len": "longest prompt plus output, tokens (default: the model's, up to 4096)",
    "kv_blocks": "KV memory, blocks of 16 tokens (default: 1 GiB, on cuda the memory that is left)",
    "max_num_seqs": "most sequences in one step (default: the mode's)",
    "token_budget": "most tokens in one step, or slo (default: the mode's)",
    "swap_blocks": "host memory for the KV of preempted requests, blocks of 16 tokens",
    "preempt": "the KV of a preempted request: recompute, swap or auto",
    "async_depth": "1 plans a step while the previous one runs",
    "max_queue": "most waiting requests; further requests get status 429",
    "outbox_tokens": "tokens that a reader may fall behind before its stream is cut off",
    "http_workers": "processes for HTTP; 0 uses the engine's own (default 0; on cuda 1 per 4 "
    "cores, up to 4)",
    "max_body_bytes": "largest request body, bytes",
    "seed": "seed of the random weights",
    "model_name": "model id in the API (default: the name of the model)",
    "api_key_env": "environment variable with the API key that clients must send",
    "cors": "origin whose pages may use the server in a browser, e.g. http://localhost:3000, or *",
    "operator": "token: requests that change the server need the operator token; open: none",
    "operator_token_env": "environment variable with the operator token (default: "
    "SLOBENCH_OPERATOR_TOKEN, else a random token, which is printed)",
    "allowed_host": "further name of the server for /debug, several with ;",
    "log_level": "sizes, or full: each step's requests and everything else that a replay needs",
    "log_dir": "directory for engine_steps.parquet and engine_events.parquet",
    "parent_pid": "stop when the process with this id ends",
    "drain_s": "seconds for running requests to finish after SIGTERM",
}


def main(arguments: list[str] | None = None) -> int:
    """Serve with the options of the command line; returns the exit code."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    flags = {k: v for k, v in vars(_parser().parse_args(arguments)).items() if v is not None}
    try:
        for path in flags.pop("plugin", ()):
            load_plugin(Path(path))
        options = choose(flags, flags.pop("set", ()))
    except SlobenchError as error:
        print(error, file=sys.stderr)  # noqa: T201 - usage error
        return error.exit_code
    return run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reference_engine",
        description="Serve a small LLM over the OpenAI API with a chosen batching mode.",
        epilog="example: python -m reference_engine --mode chunked --shape tiny --port 8000",
    )
    for name, text in _HELP.items():
        default = ServeOptions.model_fields[name].default
        suffix = "" if default is None else f" (default {default})"
        parser.add_argument(f"--{name.replace('_', '-')}", help=text + suffix, metavar="X")
    for flag, metavar, text in (
        ("--set", "K=V", "an option, or a knob of the mode or the executor; repeatable"),
        ("--plugin", "FILE", "a Python file that registers modes; repeatable"),
    ):
        parser.add_argument(flag, action="append", help=text, metavar=metavar)
    for flag, dest, text in (
        ("--no-prefix-cache", "prefix_cache", "do not reuse the KV of common prefixes"),
        (
            "--no-printable",
            "printable",
            "random shapes generate raw bytes instead of a printable character per token",
        ),
    ):
        parser.add_argument(flag, dest=dest, action="store_false", help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
