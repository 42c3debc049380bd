"""A demonstration made by hand: a tool that agrees, a tool whose figures are too high, one that
failed and one that is not installed."""

import math
from dataclasses import replace

from loadgen.manifest.sections import HostSection
from loadgen.studies.demo.figures import Figures
from loadgen.studies.demo.result import Demo, Load, Observation, Tool

TRUTH = Figures(400, 0.050, 0.051, 0.010, 0.0101, 0.012)
STALLED = Figures(400, 0.050, 0.051, 0.0147, 0.0102, 0.310)


def observation(phase, number, reported, *, truth=TRUTH, held=40.0, invalid=()):
    return Observation(phase, number, truth, reported, 0, held, 1.5, 58.6, 90.0, 0.0004, invalid)


def tool(name, *observations, state="measured", reason="", command=None):
    return Tool(
        name=name, version="1.2", command=command or f"{name} --url {{url}}", state=state,
        settings="", reason=reason, observations=observations,
    )  # fmt: skip


OURS = tool(
    "slobench",
    observation("steady", 1, TRUTH),
    observation("stalls", 1, STALLED, truth=STALLED),
    observation("steady", 2, Figures(400, 0.0504, 0.0514, 0.010, 0.0101, 0.013)),
    observation("stalls", 2, STALLED, truth=STALLED),
)
NO_GAPS = Figures(400, 0.0545, 0.091, 0.010, math.nan, math.nan)
HIGH = tool(
    "high",
    observation("steady", 1, NO_GAPS, held=34.0),
    observation("stalls", 1, replace(NO_GAPS, tpot_p99_s=0.0147), truth=STALLED),
)
BROKEN = tool("broken", state="failed", reason="exit status 1")
ABSENT = tool("absent", state="not installed", reason="pip install absent")


def demonstration(*tools):
    return Demo(
        slobench="1.0", command=("slobench", "demo", "truth"),
        host=HostSection("secret-host", 4, "A CPU", "Linux", "3.11"),
        load=Load(40, 10, 2, 64, 64, 0.05, 0.01, 200, 0.3), limit_s=0.005, tools=tools, exit_code=0,
    )  # fmt: skip
