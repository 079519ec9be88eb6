# Commands for contributors. Each target sets up its needs in .venv, so it works on a fresh clone.

PYTHON ?= python3
venv := .venv
python := $(venv)/bin/python
installed := $(venv)/.all

.PHONY: demo test gpu docs soak matrix coverage check lint format types hooks dist clean

demo: $(venv)/.virtual  ## Train two models on handwritten digits, wrapped and unwrapped, and draw timelines.
	$(python) -m examples.digits
	$(python) -m examples.pictures

test: $(installed)  ## Run the tests, in processes side by side.
	@$(python) tools/run_tests.py

gpu: $(installed)  ## Ask a GPU for what it knows, in parts of at most 100 seconds: a report in build/gpu.
	@$(python) tools/gpu.py

soak: $(installed)  ## Run the tests with many host timings, long runs and whole matrices.
	@TORCHGPIPE_SOAK=1 $(python) tools/run_tests.py

matrix:  ## Run the tests with other Pythons and torches: make matrix PAIRS="3.10:2.11.0 3.12:2.11.0".
	@$(PYTHON) tools/matrix.py $(PAIRS)

coverage: $(installed) $(venv)/.coverage  ## Tell how many lines the tests run, in percent, and which, in htmlcov.
	@$(python) -m coverage erase
	@$(python) tools/run_tests.py --coverage
	@$(python) -m coverage combine -q
	@$(python) -m coverage html -q
	@echo "coverage: $$($(python) -m coverage report --format=total) % (htmlcov/index.html)"

check: lint format types  ## Check lint, format and types.

lint: $(installed)
	$(venv)/bin/ruff check .

format: $(installed)
	$(venv)/bin/ruff format --check .

types: $(installed)
	$(venv)/bin/mypy

docs: $(venv)/.docs  ## Build the documentation site in build/docs, and check its links.
	$(python) docs/draw.py
	$(python) -m benchmarks render > /dev/null
	$(python) -m sphinx -q -W --keep-going -b html docs build/docs
	$(python) tools/check_site.py build/docs

hooks: $(installed)  ## Make git run the checks before each commit.
	$(venv)/bin/pre-commit install

dist: $(venv)/.dist  ## Make the sdist and the wheel, and try the wheel in a fresh environment.
	rm -rf build dist
	$(python) -m build --quiet
	$(python) -m twine check --strict dist/*
	$(python) tools/check_dist.py

clean:
	rm -rf $(venv) .matrix .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	rm -rf .coverage .coverage.* htmlcov build dist

# Compile the virtual accelerators, which takes half a minute. Where that fails, the demo says why.
$(venv)/.virtual: $(venv)/.demo
	@$(python) -c "from torchgpipe.testing import load; load(1)" 2> /dev/null || true
	touch $@

# Install the extra of setup.py that has the name of the stamp, such as .all. torch is installed first,
# at its pinned version, so that pip takes it from an index that has that version.
$(venv)/.%: setup.py constraints.txt
	$(PYTHON) -m venv $(venv)
	$(python) -m pip install -q -c constraints.txt torch
	$(python) -m pip install -q -c constraints.txt -e '.[$*]'
	touch $@
