"""The manifest of a run that was made up by a benchmark of measuring."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.drive.instrument import host
from loadgen.manifest.sections import (
    ClassSection,
    InstrumentLimits,
    LabelsSection,
    Manifest,
    NamesSection,
    ScenarioSection,
    TargetSection,
    WindowSection,
)


def made_up_manifest(
    run: str, measure_s: float, n_requests: int, slo: Sequence[str], classes: Sequence[str]
) -> Manifest:
    """A completed run without warm-up."""
    traffic = ClassSection((), priority=0, tenant="default", is_closed_loop=False)
    return Manifest(
        run=run,
        slobench="",
        command=(),
        scenario=ScenarioSection(name=run, source="", text="", resolved={}, sha256=""),
        seed=1,
        salt="",
        schedule_sha256="",
        n_requests=n_requests,
        slo=tuple(slo),
        classes=dict.fromkeys(classes, traffic),
        target=TargetSection(
            kind="url",
            url="http://127.0.0.1:8000",
            api="chat",
            model="m",
            api_key_env=None,
            labels=LabelsSection(),
        ),
        preflight=(),
        names=NamesSection(tuple(classes), ("default",)),
        window=WindowSection(warmup_s=0.0, measure_s=measure_s, drain_s=10.0),
        instrument_limits=InstrumentLimits(
            lateness_s=None,
            loop_lag_s=0.005,
            read_backlog_s=0.0025,
            cpu_share=0.9,
            run_delay_share=0.01,
        ),
        clock="CLOCK_MONOTONIC",
        host=host(),
        versions={},
        git="",
        started_utc="2026-01-05T10:00:00+00:00",
        ended="completed",
        end_reason="",
        server_ended_s=None,
    )
