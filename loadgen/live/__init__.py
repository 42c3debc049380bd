"""Live metrics of a run: Prometheus, OpenTelemetry, a Grafana dashboard."""
