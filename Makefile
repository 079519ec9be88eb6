# The tool belt. Each target sets up what it needs in .venv, so it works alone on a fresh clone.

PYTHON ?= python3
venv := .venv
python := $(venv)/bin/python
installed := $(venv)/.installed

.PHONY: demo test soak check clean

demo: $(installed)  ## Trains two models on handwritten digits, wrapped and unwrapped.
	$(python) -m examples.digits

test: $(installed)  ## Runs the tests.
	$(python) -m pytest -q
	$(python) -m pytest -q tests/virtual

soak: $(installed)  ## Runs the tests of virtual accelerators with many host timings, and long runs.
	TORCHGPIPE_STEPS=1000 $(python) -m pytest -q tests/test_long_runs.py
	TORCHGPIPE_SEEDS=50 TORCHGPIPE_STEPS=1000 $(python) -m pytest -q tests/virtual

check: $(installed)  ## Lint, format and types.
	$(venv)/bin/ruff check .
	$(venv)/bin/ruff format --check .
	$(venv)/bin/mypy

clean:
	rm -rf $(venv) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

# torch first and pinned, so that it comes from where pip finds that very version.
$(installed): setup.py constraints.txt
	$(PYTHON) -m venv $(venv)
	$(python) -m pip install -q -c constraints.txt torch
	$(python) -m pip install -q -c constraints.txt -e '.[all]'
	touch $@
