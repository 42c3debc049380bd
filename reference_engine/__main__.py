"""`python -m reference_engine`: serve a model from the command line."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from loadgen.errors import SlobenchError
from loadgen.plugins import load_plugin
from reference_engine.serve import run
from reference_engine.serving.serve_options import ServeOptions, choose

_HELP = {
    "mode": "batching mode",
    "shape": "random-weight shape (nano, tiny, 10m, 110m, …) or a local model directory",
    "device": "cpu (torch), cuda (torch on a GPU), toy (deterministic tokens, no torch) or "
    "sim (steps only take time)",
    "threads": "threads for torch",
    "host": "address to listen on",
    "port": "port to listen on; 0 takes a free one, printed after READY",
    "max_model_len": "longest prompt plus output, tokens",
    "kv_blocks": "KV memory, blocks of 16 tokens",
    "max_num_seqs": "most sequences in one step (default: the mode's)",
    "token_budget": "most tokens in one step, or slo (default: the mode's)",
    "swap_blocks": "host memory for the KV of preempted requests, blocks of 16 tokens",
    "preempt": "what becomes of a preempted request's KV: recompute, swap or auto",
    "async_depth": "1 plans a step while the one before it is under way",
    "max_queue": "most waiting requests; further ones get 429",
    "outbox_tokens": "tokens that a reader may fall behind before its stream is cut off",
    "http_workers": "processes that handle HTTP; 0 uses the engine's own (default: 0; on cuda one "
    "for every 4 cores, up to 4)",
    "max_body_bytes": "largest body of a request",
    "seed": "seed of the random weights",
    "model_name": "the model id to answer to",
    "api_key_env": "environment variable that holds the API key to ask for",
    "log_level": "sizes, or full: each step's requests and all that a replay needs",
    "log_dir": "where engine_steps.parquet and engine_events.parquet go",
    "parent_pid": "stop when this process ends",
    "drain_s": "seconds that running requests get at SIGTERM",
}


def main(arguments: list[str] | None = None) -> int:
    """Parse, serve, return the exit code."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    given = _parser().parse_args(arguments)
    values = {name: value for name, value in vars(given).items() if value is not None}
    try:
        for path in values.pop("plugin", ()):
            load_plugin(Path(path))
        options = choose(values, values.pop("set", ()))
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
        shown = "" if default is None else f" (default {default})"
        parser.add_argument(f"--{name.replace('_', '-')}", help=text + shown, metavar="X")
    parser.add_argument(
        "--set",
        action="append",
        help="an option, or a knob of the mode or the executor; repeatable",
        metavar="K=V",
    )
    parser.add_argument(
        "--plugin",
        action="append",
        help="a Python file that registers modes; repeatable",
        metavar="FILE",
    )
    parser.add_argument("--fronts", help=argparse.SUPPRESS)  # the old name of --http-workers
    parser.add_argument(
        "--no-prefix-cache", dest="prefix_cache", action="store_false", help="recompute prefixes"
    )
    parser.add_argument(
        "--no-printable",
        dest="printable",
        action="store_false",
        help="random shapes answer in raw bytes instead of one printable character per token",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
