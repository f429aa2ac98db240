# gradtrail: `make demo` and `make test` do everything from nothing, set-up included.

PYTHON ?= python3
BIN := .venv/bin
# WeasyPrint draws pages with these; the wheel is pure Python.
DEBIAN := libpango-1.0-0 libpangoft2-1.0-0 libharfbuzz-subset0 fonts-dejavu-core

.PHONY: help setup system demo test quick lint format bench setups clean
.DEFAULT_GOAL := help

help:  ## show this help
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: system .venv/installed  ## system packages (as root, where missing) and a virtual environment in .venv

system:
	@missing=; \
	if command -v dpkg-query >/dev/null; then \
	  for name in $(DEBIAN); do \
	    dpkg-query -W -f '$${Status}' $$name 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$name"; \
	  done; \
	fi; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ]; then \
	  echo "Installing$$missing"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	elif [ -n "$$missing" ]; then \
	  echo "Reports need these system packages. Install them once, then run make again:"; \
	  echo "  sudo apt-get install -y --no-install-recommends$$missing"; exit 1; \
	fi

.venv/installed: pyproject.toml constraints.txt examples/requirements.txt
	@echo "Setting up .venv (a few minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps -r examples/requirements.txt
	@touch $@

demo: setup  ## the whole story on a real model and real loan data
	@$(BIN)/gradtrail demo --force

test: setup lint  ## everything: lint, types, import contracts, all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

quick: setup  ## the tests that take no more than a few seconds each
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m 'not slow'

lint: setup  ## ruff, mypy --strict on auditlog, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup  ## format the code
	$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format .

bench: setup  ## every figure against its bar; rewrites results.json (ONLY=overhead,memory DEVICE=cuda QUICK=1)
	@PYTHONPATH=tests $(BIN)/python -m benchmarks.run --only "$(ONLY)" --device "$(or $(DEVICE),cpu)" \
	  $(if $(QUICK),--quick) $(if $(WRITE_README),--write-readme)

setups: setup  ## every training set-up against autograd; rewrites the table in attribution/METHODS.md
	PYTHONPATH=tests $(BIN)/python -m setups.render

clean:  ## remove what make and the tools made
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis gradtrail-demo results.json
