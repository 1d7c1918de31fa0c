# Every target sets itself up: Python 3.11 or newer is all it needs.
PYTHON ?= python3
VENV ?= .venv
# Pinned so that an installed torch is not replaced by a larger one. Any torch from 2.8 on works; for a CUDA machine: make TORCH=torch
TORCH ?= torch==2.13.0
RUN = $(VENV)/bin/python
# The real SGLang on a machine without a GPU: small modules in tests/sglang_cpu stand in for what only CUDA has.
# malloc must return a freed KV cache to the system, or nothing could be seen of it.
SGLANG_VENV ?= .venv-sglang
# The last transformers 4, beside the torch of VENV: what reads an exported model elsewhere.
OLD_VENV ?= .venv-transformers4
SGLANG_CPU = PYTHONPATH='$(CURDIR)/tests/sglang_cpu' SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=262144

.PHONY: reverse test test-slow test-all test-gpu bench-gpu check lint types doctor docs clean environments sglang-cpu test-sglang bench-engines

reverse: $(VENV)/installed  ## Train the embedded model to reverse sentences: about a minute without a GPU.
	$(RUN) -m hybrid_rl.run +recipe=reverse $(ARGS)

# Three test processes on two cores, since many tests wait; modules that start several ranks share one of them (tests/conftest.py).
WITH_OLD = OLD_TRANSFORMERS='$(CURDIR)/$(OLD_VENV)/bin/python'
PYTEST = OMP_NUM_THREADS=1 $(RUN) -m pytest -n 3 --dist loadgroup

test: $(VENV)/installed  ## The tests of one process: about three minutes.
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/installed $(OLD_VENV)/installed  ## Those that start several ranks or whole runs: whole recipes, kills at random moments, a wheel in an empty folder.
	$(WITH_OLD) $(PYTEST) -m slow $(ARGS)

test-all: $(VENV)/installed $(OLD_VENV)/installed  ## Both.
	$(WITH_OLD) $(PYTEST) $(ARGS)

test-gpu: $(if $(filter $(VENV)/%,$(RUN)),$(VENV)/installed)  ## The engine contract, gradients, handovers, checkpoints on a GPU; make test-gpu RUN=python3 needs no environment.
	$(RUN) -m tests.gpu $(ARGS)

bench-gpu: $(if $(filter $(VENV)/%,$(RUN)),$(VENV)/installed)  ## Speed and memory on a GPU: about 25 minutes, a prediction beside each number.
	$(RUN) -m benchmarks.gpu $(ARGS)

check: lint types test  ## What must pass before a change lands.

lint: $(VENV)/installed docs
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/installed
	$(RUN) -m mypy

environments: $(VENV)/installed $(OLD_VENV)/installed $(SGLANG_VENV)/installed  ## All that the tests need; make -j 2 makes two at a time.

docs: $(VENV)/installed  ## The documentation as a site, in site/; a broken link or a page that the navigation lacks is an error. Seconds.
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

doctor: $(VENV)/installed  ## What this machine can run, and why not the rest.
	$(RUN) -m hybrid_rl.doctor

sglang-cpu: $(SGLANG_VENV)/installed  ## SGLang for tests on a machine without a GPU: 2 GB, a few minutes.

test-sglang: $(SGLANG_VENV)/installed  ## The engine contract, handovers, deaths, hangs and ranks with the real SGLang, on the CPU: minutes.
	$(SGLANG_CPU) $(SGLANG_VENV)/bin/python -m pytest -n 2 --dist loadfile tests/engine/sglang $(ARGS)

bench-engines: $(SGLANG_VENV)/installed  ## local and SGLang side by side, on the CPU.
	$(SGLANG_CPU) $(SGLANG_VENV)/bin/python benchmarks/engines.py $(ARGS)

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(OLD_VENV) build dist site *.egg-info

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet '$(TORCH)'
	$(VENV)/bin/pip install --quiet -e '.[dev]'
	touch $@

$(OLD_VENV)/installed: $(VENV)/installed
	$(PYTHON) -m venv $(OLD_VENV)
	$(OLD_VENV)/bin/pip install --quiet 'transformers==4.57.*'
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(OLD_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
	touch $@

$(SGLANG_VENV)/installed: pyproject.toml tests/sglang_cpu/requirements.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/pip install --quiet torch==2.13.0
	$(SGLANG_VENV)/bin/pip install --quiet -r tests/sglang_cpu/requirements.txt
	$(SGLANG_VENV)/bin/pip install --quiet --no-deps sglang==0.5.23 xgrammar==0.2.7
	echo '$(CURDIR)' > "$$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/hybrid_rl.pth"
	touch $@
