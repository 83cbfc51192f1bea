PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: train test test-slow parity tpu-compile lint bench bench-quick

train: $(VENV)/.installed
	$(BIN)/python -m train $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup -m slow $(ARGS)

parity: $(VENV)/.installed
	$(BIN)/python -m parity_tests $(ARGS)

tpu-compile: $(VENV)/tpu/.installed
	$(BIN)/python -m parity_tests.tpu_compile $(ARGS)

bench: $(VENV)/.benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

bench-quick: $(VENV)/.benchmarks
	$(BIN)/python -m benchmarks --quick $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

$(VENV)/tpu/.installed: $(VENV)/.installed
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) \
		"$$($(BIN)/python -m parity_tests.tpu_compile.libtpu)"
	touch $@

$(VENV)/.benchmarks: $(VENV)/.installed benchmarks/requirements.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,benchmark]"
	$(BIN)/python -m pip install --quiet --no-deps --requirement benchmarks/requirements.txt
	touch $@
