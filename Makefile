# The tool belt. Each target sets up what it needs in .venv, so it works alone on a fresh clone.

PYTHON ?= python3
venv := .venv
python := $(venv)/bin/python
installed := $(venv)/.all

.PHONY: demo test suite examples virtual soak check clean

demo: $(venv)/.demo  ## Trains two models on handwritten digits, wrapped and unwrapped.
	$(python) -m examples.digits

# Accelerators are made before the first backward of a process, so their tests have one of their own.
test: $(installed)  ## Runs the tests, in processes side by side.
	@$(MAKE) --no-print-directory -j 3 suite examples virtual

suite: $(installed)
	$(python) -m pytest -q --ignore tests/examples

# What these print comes when they are done, and not between the lines of others.
examples virtual: $(installed)
	@$(python) -m pytest -q tests/$@ > $(venv)/$@.log 2>&1; \
	status=$$?; cat $(venv)/$@.log; exit $$status

soak: $(installed)  ## Runs the tests of virtual accelerators with many host timings, and long runs.
	TORCHGPIPE_STEPS=1000 $(python) -m pytest -q tests/behaviour/test_long_runs.py
	TORCHGPIPE_SEEDS=50 TORCHGPIPE_STEPS=1000 $(python) -m pytest -q tests/virtual

check: $(installed)  ## Lint, format and types.
	$(venv)/bin/ruff check .
	$(venv)/bin/ruff format --check .
	$(venv)/bin/mypy

clean:
	rm -rf $(venv) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

# What the name says of the extras of setup.py. torch first and pinned, so that it comes from where
# pip finds that very version.
$(venv)/.%: setup.py constraints.txt
	$(PYTHON) -m venv $(venv)
	$(python) -m pip install -q -c constraints.txt torch
	$(python) -m pip install -q -c constraints.txt -e '.[$*]'
	touch $@
