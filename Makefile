# The tool belt. Each target sets up what it needs in .venv, so it works alone on a fresh clone.

PYTHON ?= python3
venv := .venv
python := $(venv)/bin/python
installed := $(venv)/.all

.PHONY: demo test soak matrix coverage check lint format types hooks dist clean

demo: $(venv)/.demo  ## Trains two models on handwritten digits, wrapped and unwrapped.
	$(python) -m examples.digits

test: $(installed)  ## Runs the tests, in processes side by side.
	@$(python) tools/run_tests.py

soak: $(installed)  ## Runs the tests with many host timings, long runs and whole matrices.
	@TORCHGPIPE_SOAK=1 $(python) tools/run_tests.py

matrix:  ## Runs the tests with other Pythons and torches: make matrix PAIRS="3.10:2.9.0 3.12:2.11.0".
	@$(PYTHON) tools/matrix.py $(PAIRS)

coverage: $(installed) $(venv)/.coverage  ## Which lines the tests run, in percent, and in htmlcov.
	@$(python) -m coverage erase
	@$(python) tools/run_tests.py --coverage
	@$(python) -m coverage combine -q
	@$(python) -m coverage html -q
	@echo "coverage: $$($(python) -m coverage report --format=total) % (htmlcov/index.html)"

check: lint format types  ## Lint, format and types.

lint: $(installed)
	$(venv)/bin/ruff check .

format: $(installed)
	$(venv)/bin/ruff format --check .

types: $(installed)
	$(venv)/bin/mypy

hooks: $(installed)  ## Makes git run the checks before each commit.
	$(venv)/bin/pre-commit install

dist: $(venv)/.dist  ## Makes the sdist and the wheel, and tries the wheel in a fresh environment.
	rm -rf build dist
	$(python) -m build --quiet
	$(python) -m twine check --strict dist/*
	$(python) tools/check_dist.py

clean:
	rm -rf $(venv) .matrix .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	rm -rf .coverage .coverage.* htmlcov build dist

# Install the extra of setup.py that the stamp is named after. torch comes first and pinned, so that
# pip takes it from where it finds that very version.
$(venv)/.%: setup.py constraints.txt
	$(PYTHON) -m venv $(venv)
	$(python) -m pip install -q -c constraints.txt torch
	$(python) -m pip install -q -c constraints.txt -e '.[$*]'
	touch $@
