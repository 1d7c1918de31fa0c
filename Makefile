# Every target sets itself up: Python 3.11 or newer is all it needs.
PYTHON ?= python3
VENV ?= .venv
# Pinned so that an installed torch is not replaced by a larger one. Any torch from 2.8 on works; for a CUDA machine: make TORCH=torch
TORCH ?= torch==2.13.0
RUN = $(VENV)/bin/python

.PHONY: reverse test test-all check lint types doctor clean

reverse: $(VENV)/installed  ## Train the embedded model to reverse sentences: about a minute without a GPU.
	$(RUN) -m hybrid_rl.run +recipe=reverse $(ARGS)

test: $(VENV)/installed  ## The tests that take seconds each.
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m "not slow" $(ARGS)

test-all: $(VENV)/installed  ## Those that take minutes too: the whole recipe, kills at random moments, a wheel in an empty folder.
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(ARGS)

check: lint types test  ## What must pass before a change lands.

lint: $(VENV)/installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/installed
	$(RUN) -m mypy

doctor: $(VENV)/installed  ## What this machine can run, and why not the rest.
	$(RUN) -m hybrid_rl.doctor

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet '$(TORCH)'
	$(VENV)/bin/pip install --quiet -e '.[dev]'
	touch $@
