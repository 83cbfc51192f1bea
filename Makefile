PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup
ARGS ?=
# Tests start many processes, which would otherwise compile all our modules again.
unexport PYTHONDONTWRITEBYTECODE
# Python compiles what it imports, which is a small part of what pip would compile.
export PIP_NO_COMPILE := 1
INSTALL_NATIVE := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install \
	--force-reinstall --no-deps ./native

PYTHONS := 3.11 3.12 3.13
version = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
VERSION := $(call version,$(PYTHON))

ifeq ($(filter $(VERSION),$(PYTHONS)),)
$(error PYTHON: expected Python $(PYTHONS), got $(PYTHON), which is $(or $(VERSION),not there); \
name another one as in make PYTHON=python3.12)
endif

ifneq ($(call version,$(BIN)/python),$(VERSION))
$(VENV)/.installed: new-venv
endif

.DEFAULT_GOAL := train
.NOTPARALLEL:
.PHONY: train test test-all parity tpu-compile lint docs docs-serve bench bench-quick native \
	new-venv

train: $(VENV)/.installed
	$(BIN)/python -m train $(ARGS)

test: $(VENV)/.installed
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(VENV)/.linters $(VENV)/.without-dependencies $(VENV)/.native
	$(PYTEST) $(ARGS)
	$(PYTEST) --optimized $(ARGS)

parity: $(VENV)/.installed
	$(BIN)/python -m parity_tests $(ARGS)

tpu-compile: $(VENV)/tpu/.installed
	$(BIN)/python -m tpu_compile $(ARGS)

bench: $(VENV)/.benchmarks $(VENV)/.without-dependencies $(VENV)/.native
	$(BIN)/python -m benchmarks $(ARGS)

bench-quick: $(VENV)/.benchmarks $(VENV)/.without-dependencies $(VENV)/.native
	$(BIN)/python -m benchmarks --quick $(ARGS)

native: $(VENV)/.installed
	$(INSTALL_NATIVE)
	touch $(VENV)/.native

docs: $(VENV)/.docs $(VENV)/.without-dependencies
	$(BIN)/python -m docs_site $(ARGS)

docs-serve: docs
	$(BIN)/python -m http.server --directory build/docs/html

lint: $(VENV)/.linters $(VENV)/.docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

new-venv:
	$(PYTHON) -m venv --clear $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

$(VENV)/.linters: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

$(VENV)/tpu/.installed: $(VENV)/.installed
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) \
		"$$($(BIN)/python -m tpu_compile.libtpu)"
	touch $@

$(VENV)/.benchmarks: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,benchmark]"
	touch $@

# What no extra can name: recurrentgemma asks for typeguard < 3 and numpy < 2.4, tyro for typeguard
# >= 4. It runs with the later ones. Of helical the tests run one file, HyenaDNA's, and import no
# other; helical asks for a Python before 3.13. Of stripedhyena they import its Hyena block, which
# needs torch and einops.
$(VENV)/.without-dependencies: $(VENV)/.installed benchmarks/requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --requirement benchmarks/requirements.txt
	touch $@

# The kernels are optional: where they cannot be built, tests and benchmarks run without them.
$(VENV)/.native: $(VENV)/.installed $(wildcard native/*.* native/*/*.*)
	@$(INSTALL_NATIVE) >/dev/null 2>&1 \
		|| echo "twinscan-native was not built and is left out; make native shows why"
	touch $@

.PHONY: release-check
release-check:
	$(PYTHON) tests/release_check.py $(ARGS)
