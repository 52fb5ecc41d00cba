# `make demo` and `make test` are all the set-up there is: on a fresh clone each makes its own .venv first.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all check docs lessons bench gpu-check clean

BIN := .venv/bin
TOOLS := .venv/.tools
WHEEL := .venv/.wheel
SOURCES := $(shell find package planner profiler solvers -name '*.py' -o -name '*.html' -o -name py.typed)
BENCHMARKS ?= accuracy plan_quality planning_time apply_cost peers solver_scale checkmate largest_batch
# The first of these that is Python 3.11 or newer; `make PYTHON=/path/to/python test` takes another.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$$name" && break; done)

help:
	@echo 'make demo       profile, plan, apply and verify a small GPT-2, in a minute or two'
	@echo 'make test       formatting, lint, types, import rules, and all tests against the installed wheel'
	@echo 'make test-all   the same with the sweeps that take long'
	@echo 'make docs       build the documentation into site/'
	@echo 'make lessons    run the notebooks and store what they show'
	@echo 'make bench      run the benchmarks (hours), or one: make bench BENCHMARKS=accuracy'
	@echo 'make gpu-check  compare predictions with a CUDA device, where there is one'
	@echo 'make clean      remove .venv and everything built'

demo: $(WHEEL)
	$(BIN)/remat demo

# Small models gain nothing from a second thread, so the tests share the cores among processes instead.
test: check
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadgroup $(PYTEST)

test-all: check
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadgroup -m 'slow or not slow' $(PYTEST)

check: $(WHEEL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	cd / && '$(CURDIR)/$(BIN)/python' -c 'import remat.planner as p; assert "site-packages" in p.__file__, p.__file__'

docs: $(WHEEL)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lessons: $(WHEEL)
	$(BIN)/python notebooks/run.py

bench: $(WHEEL)
	@for name in $(BENCHMARKS); do echo "== benchmarks/$$name.py"; $(BIN)/python "benchmarks/$$name.py"; done

# Without network: make gpu-check WHEELS=/folder/of/wheels. What the machine has already, its torch too, is then used.
gpu-check: $(if $(WHEELS),,$(WHEEL))
ifdef WHEELS
	$(PYTHON) -m venv --system-site-packages .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --no-index --no-deps '$(WHEELS)'/*.whl
	.venv-gpu/bin/python benchmarks/gpu_check.py
else
	$(BIN)/python benchmarks/gpu_check.py
endif

clean:
	rm -rf .venv .venv-gpu build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Libraries and tools, made anew when what they are made from changes.
$(TOOLS): pyproject.toml constraints.txt
	@test -n '$(PYTHON)' || { echo 'Python 3.11 or newer is needed and none was found; try: make PYTHON=/path/to/python' >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev .
	touch $@

# The package itself, as a wheel: what users get is what is tested. setuptools would pack deleted modules that an
# earlier build left in build/lib.
$(WHEEL): $(TOOLS) $(SOURCES) README.md LICENSE
	rm -rf build/lib build/bdist.*
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall .
	touch $@
