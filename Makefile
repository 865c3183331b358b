# Every target sets a fresh machine up by itself: .venv/.stamp is the set-up, and it is redone when
# pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
# Two workers keep two cores busy; a test with several ranks takes both at once.
PYTEST := $(BIN)/python -m pytest --numprocesses=2 --dist=worksteal --durations=10
CODE   := src tests examples $(wildcard benchmarks)

.PHONY: train test slow check package format clean

train: $(STAMP)
	$(BIN)/shardwise train $(ARGS)

test: check
	$(PYTEST) -m "not gpu and not slow" --ignore=tests/architecture $(ARGS)

# What takes longer: other libraries beside ours, compilers, and the same promises asked for minutes.
slow: $(STAMP)
	$(PYTEST) -m "slow and not gpu" $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

# The wheel, as somebody else installs it.
package: $(STAMP)
	PYTHON=$(abspath $(BIN)/python) .ci/package

format: $(STAMP)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, so that no other package's requirement can choose it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,peers,dev]'
	touch $@
