# make test PYTHON=python3.12          another interpreter
# make test TEST_WORKERS=8              tests at a time
# make test CPU_BUDGETS=yes            fail where a suite takes more CPU seconds than it may, as CI does
# make soak MINUTES=5                  for so long, and not for 30 minutes
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

# TensorFlow beside the packages of the tests; torch and the rest it takes from there.
TENSORFLOW_VENV := .venv-tensorflow
TENSORFLOW_STAMP := $(TENSORFLOW_VENV)/installed-for-$(PYTHON_VERSION)

DOCS_STAMP := $(VENV)/docs-installed-for-$(PYTHON_VERSION)

.PHONY: help test test-library test-thorough test-thorough-tensorflow test-all test-jobs test-compat test-trainer test-tensorflow check sweep soak demo demo-tensorflow docs dist clean
.DEFAULT_GOAL := help

help:
	@echo 'make test    install what the tests need, check the code, run the tests of the library and of TensorFlow'
	@echo 'make test-library   the same without TensorFlow'
	@echo 'make test-thorough   the costly kinds of the same'
	@echo 'make test-jobs   whole jobs: scripts, launchers, hosts with networks of their own, other trainers'
	@echo 'make test-compat   the package smdistributed, and scripts written for SageMaker'
	@echo 'make test-trainer   the same with the Trainer of transformers 4.28'
	@echo 'make test-tensorflow   shardwright.tensorflow, in an environment of its own'
	@echo 'make test-all   all of these'
	@echo 'make check   lint, types, layers'
	@echo 'make sweep   the long, exhaustive tests'
	@echo 'make soak    faults at random for MINUTES=30, with restarts; then: as an undisturbed run, bit by bit?'
	@echo 'make demo    train a small GPT on two ranks'
	@echo 'make demo-tensorflow   train a small Keras GPT on one rank and on two'
	@echo 'make docs    the pages as a site in build/site, with every link checked'
	@echo 'make dist    wheel and source distribution in dist/, tried in an environment of their own'
	@echo 'make clean   remove .venv, builds and caches'

# Folders of tests that other targets run.
ELSEWHERE := e2e cluster ecosystem compat compat_trainer on_tensorflow
LIBRARY := $(patsubst %,--ignore tests/%,$(ELSEWHERE))

PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal
# Tests of a file of TensorFlow's share the runs that they look at.
PYTEST_TENSORFLOW = $(TENSORFLOW_VENV)/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile
# CPU seconds of the first argument at most, see tests/cpu_seconds.py.
BUDGET = $(if $(CPU_BUDGETS),--cpu-budget $(1))
EVERY_RUN := -m 'not thorough and not sweep'
THOROUGH := -m 'thorough and not sweep'
NO_SWEEP := -m 'not sweep'

test: test-library test-tensorflow

test-library: check
	$(PYTEST) $(EVERY_RUN) $(call BUDGET,1300) --doctest-modules --ignore src/shardwright/tensorflow $(LIBRARY) src tests

test-thorough: test-thorough-tensorflow $(STAMP)
	$(PYTEST) $(THOROUGH) $(call BUDGET,1100) $(LIBRARY) tests

test-all: test test-thorough test-jobs test-compat test-trainer

test-jobs: $(STAMP)
	$(PYTEST) $(NO_SWEEP) $(call BUDGET,700) tests/e2e tests/cluster tests/ecosystem

test-compat: $(STAMP)
	$(PYTEST) $(NO_SWEEP) $(call BUDGET,450) tests/compat

ifneq ($(filter $(PYTHON_VERSION),3.11 3.12 3.13),)
test-tensorflow: $(TENSORFLOW_STAMP)
	$(PYTEST_TENSORFLOW) $(EVERY_RUN) $(call BUDGET,300) --doctest-modules src/shardwright/tensorflow tests/on_tensorflow

test-thorough-tensorflow: $(TENSORFLOW_STAMP)
	$(PYTEST_TENSORFLOW) $(THOROUGH) $(call BUDGET,300) tests/on_tensorflow
else
test-tensorflow test-thorough-tensorflow:
	@echo 'TensorFlow 2.21 has no wheel for Python $(PYTHON_VERSION): shardwright.tensorflow is not tested.' \
	  'make test-tensorflow PYTHON=python3.11 does' >&2
endif

ifeq ($(PYTHON_VERSION),3.11)
test-trainer: $(TRAINER_STAMP)
	$(TRAINER_VENV)/bin/python -m pytest $(call BUDGET,130) tests/compat_trainer
else
test-trainer:
	@echo 'transformers 4.28 cannot be installed for Python $(PYTHON_VERSION) (tokenizers 0.13.3 has no wheel):' \
	  'its Trainer is not tested. make test-trainer PYTHON=python3.11 does' >&2
endif

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

sweep: $(STAMP) $(TENSORFLOW_STAMP)
	$(BIN)/python -m pytest -m sweep tests
	$(TENSORFLOW_VENV)/bin/python -m pytest -m sweep tests/on_tensorflow

MINUTES ?= 30
soak: $(STAMP)
	$(BIN)/python benchmarks/faults.py --soak $(MINUTES)

demo: $(STAMP)
	$(BIN)/python examples/demo.py

demo-tensorflow: $(TENSORFLOW_STAMP)
	$(TENSORFLOW_VENV)/bin/python examples/demo_tensorflow.py

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Without isolation: the build needs setuptools alone, which is there, and PIP_ARGS would not reach it.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(PYTHON) -m venv --clear build/fresh
	build/fresh/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt --quiet dist/*.whl
	cd build && fresh/bin/shardwright --version && fresh/bin/shardwright plan --help > /dev/null

clean:
	rm -rf $(VENV) $(TRAINER_VENV) $(TENSORFLOW_VENV) build dist src/*.egg-info compat/src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src compat tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(STAMP): pyproject.toml compat/pyproject.toml constraints.txt
	@test -n '$(PYTHON_VERSION)' || { echo '$(PYTHON) does not run. Name another: make test PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo '$(PYTHON) is Python $(PYTHON_VERSION); 3.11 or newer is needed: make test PYTHON=python3.12'; exit 1; }
	$(BIN)/python -c 'import pip, sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(PYTHON_VERSION)")' 2>/dev/null || \
	  $(PYTHON) -m venv --clear $(VENV)
# torch first and alone: the range in pyproject.toml would let pip take a newer, much larger build of it.
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) -e '.[torch,testing,tensorboard,report,demo,transformers,lightning,wandb,mlflow,ray,dev]' -e compat
	@touch $@

# Its own packages come first; a folder that is named like this is not searched for further .pth files.
define venv-on-top
	$(PYTHON) -m venv --clear $(1)
	$(1)/bin/python -c 'import pathlib, sys, sysconfig; \
	  folder = pathlib.Path(sysconfig.get_path("purelib")); \
	  paths = ["src", "compat/src", pathlib.Path("$(VENV)") / folder.relative_to(sys.prefix)]; \
	  (folder / "shardwright.pth").write_text("".join(f"{pathlib.Path(path).resolve()}\n" for path in paths)); \
	  command = pathlib.Path(sysconfig.get_path("scripts")) / "shardwright"; \
	  command.write_text(f"#!{sys.executable}\nimport sys\nfrom shardwright.cli import main\nsys.exit(main())\n"); \
	  command.chmod(0o755)'
endef

$(DOCS_STAMP): $(STAMP)
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@

$(TRAINER_STAMP): $(STAMP) tests/compat_trainer/constraints.txt
	$(call venv-on-top,$(TRAINER_VENV))
	$(TRAINER_VENV)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) \
	  -c tests/compat_trainer/constraints.txt transformers
	@touch $@

# tf_keras asks for tensorflow, which would take the place of tensorflow-cpu.
$(TENSORFLOW_STAMP): $(STAMP) tests/on_tensorflow/constraints.txt
	$(call venv-on-top,$(TENSORFLOW_VENV))
	$(TENSORFLOW_VENV)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) \
	  -c constraints.txt -c tests/on_tensorflow/constraints.txt tensorflow-cpu
	$(TENSORFLOW_VENV)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) --no-deps \
	  -c tests/on_tensorflow/constraints.txt tf_keras
	$(TENSORFLOW_VENV)/bin/python -m smdistributed.horovod install
	@touch $@
