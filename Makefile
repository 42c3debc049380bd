# Two commands: `make demo` and `make test`. Both make their environment in .venv first.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

SECONDS ?= 10

.PHONY: help demo test faults fuzz release-check check picture notebook docs bench gpu-check clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: .venv/engine ## measure the bundled engine for 20 s and write runs/…/report.html
	@$(BIN)/slobench run scenarios/quickstart.yaml --target reference

test: .venv/dev ## the whole test suite
	@scripts/test

faults: .venv/dev ## the tests of faults: docs/reliability.md
	@$(BIN)/python -m pytest -q -m faults

fuzz: .venv/dev ## random input for every parser that reads from outside (SECONDS=10 each)
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

release-check: .venv/dev ## the tests of each night: the wheel in an empty environment, the tutorial in full
	@$(BIN)/python -m pytest -q -m release --release

check: .venv/dev ## formatting, lint, types
	@scripts/check

picture: .venv/dev ## docs/capacity.png again: a search of six minutes against the bundled engine
	@$(BIN)/python scripts/readme_picture.py

notebook: .venv/dev ## docs/example.ipynb again, executed against the mock server
	@$(BIN)/python scripts/example_notebook.py

docs: .venv/docs ## the docs site in build/site, with a gallery of every page
	@$(BIN)/python scripts/gallery.py
	@$(BIN)/mkdocs build --strict

bench: .venv/dev ## the benchmarks that need no GPU; results go to benchmarks/results
	@for script in $(filter-out benchmarks/gpu_suite.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

gpu-check: ## on a machine with an NVIDIA GPU: test and measure the engine there (STAGE=1|2|3 RESUME=FILE)
	@scripts/gpu-check --stage $(or $(STAGE),1) $(if $(RESUME),--resume $(RESUME))

clean: ## remove the environment and caches, keep runs/
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  reports/static/vega.js reports/static/vega-licenses.txt

.venv/bin/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "slobench needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	"$(PYTHON)" -m venv .venv

# What is installed is pinned in constraints.txt, so that a run today and in a year is the same.
.venv/engine: pyproject.toml requirements.txt constraints.txt scripts/vega/package-lock.json | .venv/bin/python
	@echo "installing slobench and the reference engine into .venv (torch is the large part)…"
	$(PIP) install -q -c constraints.txt -e '.[engine]'
	@test -e reports/static/vega.js || \
	  echo "built without npm: the figures of pages take Vega from vl-convert-python, installed with it"
	$(BIN)/python -m compileall -q loadgen reference_engine reports targets slobench.py
	@touch $@

.venv/docs: pyproject.toml requirements.txt constraints.txt scripts/vega/package-lock.json | .venv/bin/python
	$(PIP) install -q -c constraints.txt -e '.[docs]'
	@touch $@

.venv/dev: .venv/engine
	$(PIP) install -q -c constraints.txt -e '.[engine,docs,dev]'
	@touch $@
