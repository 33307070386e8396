# Every command makes the environment it needs; the two a newcomer wants are `make demo` and `make test`.
PYTHON ?= python3
MINUTES ?= 20
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
$(if $(VERSION),,$(error PYTHON=$(PYTHON) cannot be run; name an installed Python, as in PYTHON=python3.12))
RUN := .venv/run-$(VERSION)
DEV := .venv/dev-$(VERSION)
LOW := .venv/low-$(VERSION)
BENCH := .venv/bench-$(VERSION)
GRAIN := .venv/grain-0.2.17-$(VERSION)
STREAMING := .venv/streaming-$(VERSION)
CASES ?=
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: demo test check tests lowest bench soak clean

demo: $(RUN)/ready  ## install and train a small network on the embedded digits
	$(RUN)/bin/millstream demo

test: check tests  ## lint, type check and the whole test suite, with all extras

check: $(DEV)/ready  ## lint, type check, and the site of the documentation, in build/site
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/ruff check .
	$(DEV)/bin/pyright --pythonpath $(DEV)/bin/python
	$(DEV)/bin/mypy
	NO_MKDOCS_2_WARNING=1 $(DEV)/bin/mkdocs build --strict --quiet

tests: $(DEV)/ready  ## the test suite
	$(DEV)/bin/python -m pytest -n 2 --dist worksteal --durations=10

lowest: $(LOW)/ready  ## the test suite against the oldest dependencies pyproject.toml allows
	$(LOW)/bin/python -m pytest -n 2 --dist worksteal

bench: $(BENCH)/ready $(GRAIN)/ready $(STREAMING)/ready  ## benchmarks beside their peers, and their report; CASES="--resume", "--quick", names of cases
	$(BENCH)/bin/python benchmarks/run.py --also grain-0.2.17=$(GRAIN)/bin/python --also streaming=$(STREAMING)/bin/python $(CASES)

soak: $(DEV)/ready  ## faults again and again, against what should come out; MINUTES=20
	$(DEV)/bin/python tests/soak $(MINUTES)

clean:
	rm -rf .venv dist build

$(RUN)/ready: pyproject.toml
	$(PYTHON) -m venv $(RUN)
	$(RUN)/bin/python $(PIP) -e .
	touch $@

$(DEV)/ready: pyproject.toml
	$(PYTHON) -m venv $(DEV)
	$(DEV)/bin/python $(PIP) -e '.[dev]'
	touch $@

$(LOW)/ready: pyproject.toml
	$(PYTHON) -m venv $(LOW)
	$(LOW)/bin/python $(PIP) uv
	$(LOW)/bin/uv pip install --quiet --resolution lowest-direct --python $(LOW)/bin/python -e '.[all,test]' 'pyparsing==3.2.5' # the oldest matplotlib uses names that later ones deprecate
	touch $@

$(BENCH)/ready: pyproject.toml
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python $(PIP) torch==2.13.0
	$(BENCH)/bin/python $(PIP) -e '.[bench]'
	$(BENCH)/bin/python $(PIP) --no-deps 'ciclo==0.1.9; python_version < "3.12"' pkbar==0.5
	touch $@

$(GRAIN)/ready: $(BENCH)/ready
	$(PYTHON) -m venv $(GRAIN)
	$(GRAIN)/bin/python $(PIP) grain==0.2.17 pillow jax==$$($(BENCH)/bin/python -c 'import jax; print(jax.__version__)')
	touch $@

$(STREAMING)/ready: $(BENCH)/ready  # MosaicML streaming needs huggingface-hub below 1.0, and datasets at least 1.31
	$(PYTHON) -m venv $(STREAMING)
	$(STREAMING)/bin/python $(PIP) mosaicml-streaming==0.13.0 torch==2.13.0 jax==$$($(BENCH)/bin/python -c 'import jax; print(jax.__version__)')
	touch $@
