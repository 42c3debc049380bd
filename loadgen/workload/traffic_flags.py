"""The flags that describe traffic, each declared once: its name and type, its help, and the
scenario key that it sets. The command line, Locust's form and scenarios of flags follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_type_hints


@dataclass(frozen=True)
class Flag:
    """A flag that sets the scenario `key`. `unit` is that of a bare number; `names` are the names
    on the command line, if not just `--` and the field's. `role`: traffic has one load, an open
    loop or a closed loop; without a scenario file, every length is required."""

    key: str
    help: str
    unit: str = ""
    names: tuple[str, ...] = ()
    role: Literal["open loop", "closed loop", "length", "other"] = "other"


@dataclass(frozen=True)
class TrafficFlags:
    """Traffic without a scenario file, or changes to the file's; None is a flag that was not
    given."""

    dataset: Annotated[
        str | None,
        Flag("prompts", "Send the prompts of a file; FILE[:format], e.g. chats.jsonl:messages."),
    ] = None
    trace: Annotated[
        str | None,
        Flag(
            "arrivals",
            "Replay the times and lengths of a file, as a whole or for --duration, with --rate at "
            "another mean rate; FILE[:format].",
        ),
    ] = None
    rate: Annotated[
        str | None,
        Flag("arrivals.rate", "Poisson arrivals per second, e.g. 8.", unit="/s", role="open loop"),
    ] = None
    users: Annotated[
        int | None,
        Flag(
            "arrivals.users",
            "A closed loop: users who send, wait for the answer, pause for --think, and send "
            "again.",
            names=("--users", "-u"),
            role="closed loop",
        ),
    ] = None
    think: Annotated[
        str | None,
        Flag(
            "arrivals.think",
            "With --users: the pause after each answer, e.g. 2s. Default: none.",
            unit="s",
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        Flag(
            "arrivals.users",
            "A closed loop: requests in flight; the next starts when one ends.",
            role="closed loop",
        ),
    ] = None
    input_len: Annotated[
        int | None,
        Flag("requests.input_tokens", "Prompt tokens of each request.", role="length"),
    ] = None
    output_len: Annotated[
        int | None,
        Flag("requests.output_tokens", "Output tokens of each request.", role="length"),
    ] = None
    top_p: Annotated[
        float | None,
        Flag(
            "sampling.top_p",
            "Tokens are drawn among the most likely that have this probability together, e.g. 0.9.",
        ),
    ] = None
    duration: Annotated[
        str | None,
        Flag(
            "phases.measure",
            "Length of the measured window, e.g. 60s.",
            unit="s",
            names=("--duration", "--run-time", "-t"),
        ),
    ] = None
    num_prompts: Annotated[
        int | None,
        Flag(
            "phases.requests",
            "The measured window ends with so many requests; with --duration, whichever comes "
            "first.",
            names=("--num-prompts", "--max-requests", "--request-count"),
        ),
    ] = None
    warmup: Annotated[
        str | None,
        Flag("phases.warmup", "Time before the measured window, e.g. 5s.", unit="s"),
    ] = None
    max_concurrency: Annotated[
        int | None,
        Flag(
            "limits.max_concurrency",
            "A safety limit of --rate: a request that is due while so many are in flight is "
            "dropped and counts as failed. To keep N in flight: --concurrency N.",
        ),
    ] = None


FILES = ("dataset", "trace")
"""The flags that name a file, by the order in which they are set: before the flags of its keys."""
FLAGS: Mapping[str, Flag] = {
    name: next(part for part in hint.__metadata__ if isinstance(part, Flag))
    for name, hint in get_type_hints(TrafficFlags, include_extras=True).items()
}
"""The declaration of each traffic flag, by its name in Python."""
CLOSED_LOOPS = tuple(name for name, flag in FLAGS.items() if flag.role == "closed loop")
LOADS = tuple(name for name, flag in FLAGS.items() if flag.role.endswith("loop"))
LENGTHS = tuple(name for name, flag in FLAGS.items() if flag.role == "length")


def flag_of(name: str) -> str:
    """`--input-len` for `input_len`."""
    return "--" + name.replace("_", "-")
