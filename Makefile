# make demo: set up, then plan, train on local CPU ranks and compare.   make test: set up, then style, types and all tests.
# The set-up runs again only when pyproject.toml or constraints.txt change. PYTHON chooses the interpreter, VENV the folder.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

export OMP_NUM_THREADS ?= 1

.PHONY: demo test sweep zoo parity setup clean

demo: $(READY)
	$(BIN)/shardwise demo

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

# Random op cases, and random programs of several ops, on ranks as threads against one process.
sweep: $(READY)
	$(BIN)/python -m tests.sweep --cases 3000 --seed 0
	$(BIN)/python -m tests.programs --cases 1000 --seed 0

# Public models, unmodified, split over ranks against one process.
zoo: $(READY)
	$(BIN)/python -m benchmarks.zoo

# Recipes under many layouts against one process.
parity: $(READY)
	$(BIN)/python -m benchmarks.parity

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "shardwise needs Python 3.11 or newer; $(PYTHON) is older. Use: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[models,data,report,zoo,dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist
