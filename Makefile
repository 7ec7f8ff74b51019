# One command each: serve a model, run the tests, check the code. Everything lives in .venv.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Tensor tests are small: one thread each is fastest and leaves the second core to the other worker.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: install serve test test-slow check fix bench-smoke device-check

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard src/forerun/kernels/cpp/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

serve: $(STAMP)
	$(BIN)/forerun serve

# Style, types, layers, then every test that is not marked slow or gpu.
test: check
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

fix: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench-smoke: $(STAMP)
	$(BIN)/python benchmarks/step_cost.py --repeats 3

device-check: $(STAMP)
	$(BIN)/python scripts/device_check.py
