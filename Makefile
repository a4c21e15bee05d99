# make test PYTHON=python3.12          another interpreter
# make test TEST_WORKERS=8              tests at a time
# make test PIP_ARGS='--no-index -f /path/to/wheels'   options for pip, for example another source of packages

PYTHON ?= python3
PIP_ARGS ?=
TEST_WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# The interpreter's version is part of the name, so that another PYTHON makes another environment.
STAMP := $(VENV)/installed-for-$(PYTHON_VERSION)

# Tests start dozens of interpreters: each would compile the package anew, a second of its own each.
export PYTHONDONTWRITEBYTECODE :=

# transformers 4.28 beside the newer one of the tests; torch and the rest it takes from there.
TRAINER_VENV := .venv-transformers-4.28
TRAINER_STAMP := $(TRAINER_VENV)/installed-for-$(PYTHON_VERSION)

.PHONY: help test test-trainer check sweep demo clean
.DEFAULT_GOAL := help

help:
	@echo 'make test    install what the tests need into .venv, check the code, run the tests'
	@echo 'make test-trainer   the tests of the package smdistributed with the Trainer of transformers 4.28'
	@echo 'make check   lint, types, layers'
	@echo 'make sweep   the long, exhaustive tests'
	@echo 'make demo    train a small GPT on two ranks'
	@echo 'make clean   remove .venv, builds and caches'

test: check
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal --doctest-modules -m 'not sweep' src tests

ifeq ($(PYTHON_VERSION),3.11)
test-trainer: $(TRAINER_STAMP)
	$(TRAINER_VENV)/bin/python -m pytest tests/compat_trainer
else
test-trainer:
	@echo 'transformers 4.28 cannot be installed for Python $(PYTHON_VERSION) (tokenizers 0.13.3 has no wheel):' \
	  'its Trainer is not tested. make test-trainer PYTHON=python3.11 does' >&2
endif

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

sweep: $(STAMP)
	$(BIN)/python -m pytest -m sweep tests

demo: $(STAMP)
	$(BIN)/python examples/demo.py

clean:
	rm -rf $(VENV) $(TRAINER_VENV) build dist src/*.egg-info compat/src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src compat tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(STAMP): pyproject.toml compat/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo '$(PYTHON) is Python $(PYTHON_VERSION); 3.11 or newer is needed: make test PYTHON=python3.12'; exit 1; }
	$(BIN)/python -c 'import pip, sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(PYTHON_VERSION)")' 2>/dev/null || \
	  $(PYTHON) -m venv --clear $(VENV)
# torch first and alone: the range in pyproject.toml would let pip take a newer, much larger build of it.
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) -e '.[torch,testing,tensorboard,report,demo,calibration,ray,dev]' -e compat
	@touch $@

$(TRAINER_STAMP): $(STAMP) tests/compat_trainer/constraints.txt
	$(PYTHON) -m venv --clear $(TRAINER_VENV)
# Its own packages come first; a folder that is named like this is not searched for further .pth files.
	$(TRAINER_VENV)/bin/python -c 'import pathlib, sys, sysconfig; \
	  folder = pathlib.Path(sysconfig.get_path("purelib")); \
	  paths = ["src", "compat/src", pathlib.Path("$(VENV)") / folder.relative_to(sys.prefix)]; \
	  (folder / "shardwright.pth").write_text("".join(f"{pathlib.Path(path).resolve()}\n" for path in paths))'
	$(TRAINER_VENV)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) \
	  -c tests/compat_trainer/constraints.txt transformers
	@touch $@
