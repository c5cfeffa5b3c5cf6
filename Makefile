# `make demo` and `make test` do all their set-up on a fresh machine; a second run starts at once.
# `make gpu-test` uses an existing Python with torch for CUDA, triton and pytest, and installs nothing.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
# Kernels are compiled with these too, beside the installed version.
OTHER_TRITONS ?= 3.8.0 3.9.0

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OTHER_INSTALLED := $(OTHER_TRITONS:%=.triton/%/.installed)

.PHONY: demo test lint format gpu-test clean

demo: $(INSTALLED)
	$(BIN)/tilecrew demo

# Files in the order of collection, those with slow tests first. By default those with many tests go first, and the run
# ends with one worker at the few tests of the slowest file.
test: lint $(OTHER_INSTALLED)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not gpu and not multi_gpu"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu-test:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu --gpu-record tests/gpu_record.json

# Triton first: a CPU build of torch asks for none and keeps this one;
# a CUDA build replaces it by the one it was made for.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps "$(TRITON)"
	$(BIN)/python -m pip install --quiet "$(TORCH)" --editable ".[cli,transformers,fla,dev]"
	touch $@

.triton/%/.installed: | $(INSTALLED)
	rm -rf .triton/$*
	$(BIN)/python -m pip install --quiet --no-deps --target .triton/$* triton==$*
	touch $@

clean:
	rm -rf $(VENV) .triton
