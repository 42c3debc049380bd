"""A Grafana dashboard of the live metrics; `slobench export --format grafana` writes it."""

from __future__ import annotations

from loadgen.manifest.json_section import JsonObject

Query = tuple[str, str]  # (PromQL, legend)
_JOIN = ' * on(instance) group_left(run) slobench_run_info{run=~"$run"}'
_CLASS = 'class=~"$class"'
_WIDTH, _HEIGHT = 12, 8
_SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def _rate(series: str, labels: str = "", by: str = "run") -> str:
    selector = f"{{{labels}}}" if labels else ""
    return f"sum by ({by}) (rate({series}{selector}[$__rate_interval]){_JOIN})"


def _quantiles(series: str) -> list[Query]:
    buckets = _rate(f"{series}_bucket", _CLASS, "le, run")
    return [
        (f"histogram_quantile({share}, {buckets})", f"{{{{run}}}} {name}")
        for name, share in _QUANTILES.items()
    ]


PANELS: list[tuple[str, str, list[Query]]] = [
    (
        "Request rate: scheduled, sent, SLO met",
        "reqps",
        [
            (_rate("slobench_scheduled_total"), "{{run}} scheduled"),
            (_rate("slobench_sent_total"), "{{run}} sent"),
            (_rate("slobench_slo_met_total", _CLASS), "{{run}} goodput"),
        ],
    ),
    ("TTFT from the scheduled send time", "s", _quantiles("slobench_ttft_seconds")),
    ("Time per output token (TPOT)", "s", _quantiles("slobench_tpot_seconds")),
    ("Time between tokens (ITL)", "s", _quantiles("slobench_itl_seconds")),
    ("End-to-end latency from the scheduled send time", "s", _quantiles("slobench_e2e_seconds")),
    (
        "Requests in flight and waiting",
        "short",
        [
            (f"slobench_in_flight{_JOIN}", "{{run}} in flight"),
            (f"slobench_waiting{_JOIN}", "{{run}} waiting for a slot"),
        ],
    ),
    (
        "Requests without success, by status",
        "reqps",
        [
            (
                _rate("slobench_requests_total", f'{_CLASS}, status!="ok"', "run, status"),
                "{{run}} {{status}}",
            )
        ],
    ),
    ("Send lateness of the load generator", "s", _quantiles("slobench_lateness_seconds")),
]
"""Title, unit and queries of each panel."""


def dashboard() -> JsonObject:
    """The dashboard in Grafana's import format, with variables for the Prometheus data source, the
    run and the traffic class."""
    source = {"label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}
    return {
        "__inputs": [{"name": "DS_PROMETHEUS", **source}],
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


def _variable(name: str, query: str) -> dict[str, object]:
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


def _panel(number: int, title: str, unit: str, queries: list[Query]) -> dict[str, object]:
    x, y = _WIDTH * (number % 2), _HEIGHT * (number // 2)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + k), "expr": expression, "legendFormat": legend}
            for k, (expression, legend) in enumerate(queries)
        ],
    }
