"""A run as others watch it while it goes on: Prometheus, OpenTelemetry, a Grafana dashboard."""
