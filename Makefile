# Two commands: `make chat` and `make test`. Needs python3 (3.10 or newer), make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: setup chat test test-long lint golden bench clean
export PROMPT MODEL

setup: $(VENV)/.lisa

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.lisa: pyproject.toml | $(BIN)/python
	@echo "installing lisa into $(VENV)" >&2
	@$(PIP) --editable ".[cpu]"
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing lisa and its test tools into $(VENV)" >&2
	@$(PIP) --editable ".[cpu,dev]"
	@touch $@ $(VENV)/.lisa

# make chat PROMPT="What is the capital of France?" answers once; MODEL=... takes another model.
chat: setup
	@$(BIN)/lisa chat $(if $(MODEL),--model "$$MODEL") $(if $(PROMPT),-- "$$PROMPT" < /dev/null)

test: $(VENV)/.dev
	$(BIN)/python -m pytest

test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -m "slow or not slow"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

golden: setup
	$(BIN)/python -m bench.golden tests/golden/*/

# Everything measurable on this machine, appended to bench/results; the docs' numbers are made from it.
bench: setup
	$(BIN)/python -m bench.host --save
	$(BIN)/python -m bench.plain --save
	@if [ "$$(uname -s)" = Linux ]; then $(BIN)/python -m bench.blas --save; fi
	$(BIN)/lisa bench smollm2-135m --drafters ngram --save
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --editable ".[serve]"
	$(BIN)/python -m bench.serve --save
	$(BIN)/python -m bench.prefix --save
	@if [ "$$(uname -s)-$$(uname -m)" = Darwin-arm64 ]; then $(BIN)/python -m bench.claim; $(BIN)/python -m bench.kernels; fi
	$(BIN)/python -m bench.report

clean:
	rm -rf $(VENV)
