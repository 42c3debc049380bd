"""A Grafana dashboard of the live series: `slobench export --format grafana` writes it."""

from __future__ import annotations

from typing import Any

Query = tuple[str, str]  # (PromQL, legend)
_OF_RUN = 'run=~"$run"'
_JOIN = f" * on(instance) group_left(run) slobench_run_info{{{_OF_RUN}}}"
_WIDTH, _HEIGHT = 12, 8


def _quantile(share: float, series: str) -> str:
    buckets = f'rate({series}_bucket{{class=~"$class"}}[$__rate_interval])'
    return f"histogram_quantile({share}, sum by (le, run) ({buckets}{_JOIN}))"


def _rate(series: str, labels: str = "", by: str = "run") -> str:
    return f"sum by ({by}) (rate({series}{labels}[$__rate_interval]){_JOIN})"


def _latency(series: str) -> list[Query]:
    return [(_quantile(share, series), f"{{{{run}}}} {name}") for name, share in _SHOWN.items()]


_SHOWN = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_OF_CLASS = '{class=~"$class"}'
PANELS: list[tuple[str, str, list[Query]]] = [
    (
        "Rate: planned, sent, kept every promise",
        "reqps",
        [
            (_rate("slobench_scheduled_total"), "{{run}} planned"),
            (_rate("slobench_sent_total"), "{{run}} sent"),
            (_rate("slobench_promises_kept_total", _OF_CLASS), "{{run}} goodput"),
        ],
    ),
    ("Time to first token, from the planned instant", "s", _latency("slobench_ttft_seconds")),
    ("Time per output token", "s", _latency("slobench_tpot_seconds")),
    ("Time between tokens", "s", _latency("slobench_itl_seconds")),
    ("End to end, from the planned instant", "s", _latency("slobench_e2e_seconds")),
    (
        "In flight and waiting",
        "short",
        [
            (f"slobench_in_flight{_JOIN}", "{{run}} in flight"),
            (f"slobench_waiting{_JOIN}", "{{run}} waiting for a slot"),
        ],
    ),
    (
        "Requests that did not end well",
        "reqps",
        [
            (
                _rate(
                    "slobench_requests_total",
                    '{class=~"$class", status!="ok"}',
                    "run, status",
                ),
                "{{run}} {{status}}",
            )
        ],
    ),
    ("How late the load generator sends", "s", _latency("slobench_lateness_seconds")),
]
"""Title, unit and queries of each panel."""


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it; asks for a Prometheus data source, a run and classes."""
    return {
        "__inputs": [
            {
                "name": "DS_PROMETHEUS",
                "label": "Prometheus",
                "type": "datasource",
                "pluginId": "prometheus",
            }
        ],
        "title": "slobench",
        "uid": "slobench-live",
        "tags": ["slobench", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {
            "list": [
                _variable("run", "label_values(slobench_run_info, run)"),
                _variable("class", "label_values(slobench_requests_total, class)"),
            ]
        },
        "panels": [_panel(number, *panel) for number, panel in enumerate(PANELS)],
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


_SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def _panel(number: int, title: str, unit: str, queries: list[Query]) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {
            "x": _WIDTH * (number % 2),
            "y": _HEIGHT * (number // 2),
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + k), "expr": expression, "legendFormat": legend}
            for k, (expression, legend) in enumerate(queries)
        ],
    }
