PYTHON ?= python3

# Tests and the demo run several processes on one machine: one thread each, unless the user says otherwise.
export OMP_NUM_THREADS ?= 1
# They start hundreds of processes, each of which would compile the library's modules anew.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A bar for every download, but no list of the packages that are there already. Modules are compiled when they are
# imported: pip would take a minute for all of them, and an import of torch takes 3 s longer, once.
PIP_INSTALL := $(BIN)/python -m pip install --no-input --no-compile -c constraints.txt
# A file's tests share what its fixtures have started. Workers take the files in the order of tests/conftest.py; the
# third works while ranks of the others wait for each other, and more only take the cores from ranks that would not.
PYTEST := -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations 10 --durations-min 15

# The core: operators by their definition, formats, plans, collectives, one job of FSDP2 and one resume. Two workers,
# because a third takes longer to start than it saves.
CORE := tests/test_config.py tests/quantization --ignore tests/quantization/test_properties.py
CORE += $(addprefix tests/collectives/test_,plan.py sections.py reduce_scatter.py all_reduce.py)
CORE += tests/engines/fsdp2/test_exactness.py::test_two_ranks_with_the_identity_equal_plain_fsdp2_bit_for_bit
CORE += tests/engines/fsdp2/test_checkpoint.py::test_a_resumed_run_continues_bit_for_bit

# The tiers: each file of tests/ is in one. `make test` also runs PROGRAMS, one run of each program, which are in the
# tier of the lab, too. A change runs the tiers that import what it touches: tests/tiers.py.
TIER_library := collectives engines quantization trainers test_*.py lab/benchmarks/test_tables.py lab/test_examples.py
TIER_kernels := kernels
TIER_lab := lab/common lab/compare lab/plan lab/pretrain lab/report lab/selftest lab/simulated
TIER_lab += lab/test_[cfnu]*.py lab/test_examples_paper.py
TIER_benchmarks := lab/benchmarks/test_[!t]*.py
TIER_megatron := megatron
TIER_deepspeed := deepspeed
TIER_ecosystem := ecosystem
# Those that `make install` has the packages of, besides the library's.
OTHERS := lab kernels benchmarks megatron
PROGRAMS := lab/test_commands.py
PROGRAMS += lab/pretrain/test_runs.py::test_the_command_line_trains_on_two_processes
PROGRAMS += lab/pretrain/test_runs.py::test_compare_writes_summary_table_and_curves
PROGRAMS += lab/pretrain/data/test_preprocess.py::TestCommand::test_training_reads_what_it_wrote
PROGRAMS += lab/plan/test_command.py::test_a_plan_as_text_has_bytes_times_memory_and_a_recommendation
PROGRAMS += lab/plan/test_probe.py::test_timed_exchanges_send_the_counted_bytes
PROGRAMS += lab/report/test_runs.py::test_the_command_writes_a_small_page_that_loads_nothing
PROGRAMS += lab/selftest/test_selftest.py::test_one_process_skips_what_needs_several

# Those of the library that also run on the newest torch, whose Triton compiles all kernels for GPUs that are not there.
TORCH_newest := engines/ddp engines/fsdp2 trainers kernels/test_triton_compile.py

# The slow tests, in parts of about 10 minutes on two cores: folders and files of tests/. Two folders are divided by the
# first letter of their files. Mutations and mutants are tests of one file that share nothing, so workers divide them.
SLOW_kernels := kernels
SLOW_collectives := collectives quantization
SLOW_fsdp2 := engines/fsdp2/test_[!s]*.py
SLOW_switches := engines/fsdp2/test_s*.py
SLOW_engines := engines/ddp engines/test_[!su]*.py
SLOW_streams := engines/test_s*.py
SLOW_unchecked := engines/test_u*.py
SLOW_megatron := megatron
SLOW_launch := lab/common lab/selftest
SLOW_pretrain := lab/pretrain
SLOW_compare := lab/compare lab/plan lab/report
SLOW_benchmarks := lab/benchmarks
SLOW_packages := lab/test_newest_packages.py test_docs.py test_package.py test_properties_config.py test_tiers.py
SLOW_mutations := test_mutations.py
SLOW_mutants := test_mutants.py
SLOW_users := lab/test_examples.py lab/test_user_path.py
PARTS := $(patsubst SLOW_%,%,$(filter SLOW_%,$(.VARIABLES)))

# An environment of its own for another torch, with its own pins of torch and triton if there is a file of them.
OTHER := .venv-torch-$(VERSION)-$(notdir $(PYTHON))
OTHER_PINS := $(wildcard constraints-torch-$(basename $(VERSION)).txt)
OTHER_INSTALL = $(OTHER)/bin/python -m pip install --quiet --no-compile -c $(OTHER)/constraints.txt torch==$(VERSION)

# An environment of its own for trainers and launchers of other packages. `UNRESOLVED` ask for older packages than they
# need, or for packages that their tests do not need; DeepSpeed is built from its sources.
ECOSYSTEM := .venv-ecosystem
ECOSYSTEM_INSTALL := $(ECOSYSTEM)/bin/python -m pip install --quiet --no-compile -c constraints.txt -c constraints-ecosystem.txt
TRAINERS := accelerate bitsandbytes datasets lightning peft scipy sentence-transformers tensorboard torchao transformers trl
LAUNCHERS := kubeflow_trainer_api 'ray[train]' torchft
TORCHTITAN_NEEDS := einops spmd_types torch_checkpointing torchdata triton tyro
DEEPSPEED_NEEDS := einops hjson msgpack ninja psutil py-cpuinfo pydantic tqdm
OLMO_CORE_NEEDS := bettermap dataclass-extensions google-cloud-storage importlib_resources jmespath
UNRESOLVED := ai2-olmo-core boto3 botocore cached-path s3transfer
UNRESOLVED += addict axolotl colorama flashoptim megatron-fsdp nemo-automodel torchtitan

.DEFAULT_GOAL := help
.PHONY: help install demo docs dist test test-lab test-kernels test-benchmarks test-megatron test-tiers test-all
.PHONY: test-core test-unit test-slow test-deepspeed test-deepspeed-mutants test-ecosystem
.PHONY: gpu-report test-torch test-pytorch check format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv with the library and its development tools

# torch goes first: the pinned build is then in place before anything that depends on it is resolved.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch setuptools
	$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	touch $@

demo: $(STAMP) ## train a small GPT with and without 4-bit communication, into runs/demo
	$(BIN)/sdp4bit demo --out runs/demo

docs: $(STAMP) ## build the documentation site, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'open build/site/index.html'

dist: $(STAMP) ## build the wheel and the sdist, into dist
	rm -rf dist
	$(BIN)/python -m build --no-isolation

test: $(STAMP) ## run the tests of the library and of the examples, and one run of each program
	$(BIN)/python $(PYTEST) $(addprefix tests/,$(TIER_library) $(PROGRAMS))

test-lab: TIERS := lab
test-lab: test-tiers ## run the tests of the programs

test-kernels: TIERS := kernels
test-kernels: test-tiers ## run the tests of the kernels, compiled and in Triton's interpreter

test-megatron: TIERS := megatron
test-megatron: test-tiers ## run the tests of the adapter of Megatron-Core

test-benchmarks: TIERS := benchmarks
test-benchmarks: test-tiers ## run the tests of the benchmarks

test-tiers: $(STAMP) ## run the tests of several tiers, in one call: TIERS='lab kernels'
	@test -n '$(TIERS)' || { echo 'which tiers? there are: library $(OTHERS)'; exit 2; }
	$(BIN)/python $(PYTEST) $(addprefix tests/,$(foreach each,$(TIERS),$(TIER_$(each))))

test-all: ## run the tests of all tiers, those that need other packages too
	@$(MAKE) --no-print-directory test-tiers TIERS='library $(OTHERS)'
	@$(MAKE) --no-print-directory test-ecosystem
	@$(MAKE) --no-print-directory test-deepspeed

test-core: $(STAMP) ## run the core of the tests, in a minute: definition, formats, plans, collectives, FSDP2
	$(BIN)/python $(PYTEST) -n 2 $(CORE)

test-unit: $(STAMP) ## run the tests that start no process
	$(BIN)/python $(PYTEST) -m 'unit and not slow'

test-slow: $(STAMP) ## run the tests marked slow, or a part of them: PART=fsdp2
	@test -n '$(if $(PART),$(SLOW_$(PART)),all)' || { echo 'no such part; there are: $(sort $(PARTS))'; exit 2; }
	$(BIN)/python $(PYTEST) -m slow $(addprefix tests/,$(SLOW_$(PART))) $(if $(filter mutations mutants megatron unchecked,$(PART)),--dist load)

test-deepspeed: $(ECOSYSTEM)/.installed ## run the tests of the adapter of DeepSpeed
	$(ECOSYSTEM)/bin/python -m pytest -q -k deepspeed tests/deepspeed $(addprefix tests/engines/test_,events.py contract.py)

test-deepspeed-mutants: $(ECOSYSTEM)/.installed ## run the mutants that the tests of the adapter of DeepSpeed notice
	$(ECOSYSTEM)/bin/python -m tests.mutants.run tests/deepspeed

test-ecosystem: $(ECOSYSTEM)/.installed ## run the tests with other packages: trainers, launchers, torchao
	$(ECOSYSTEM)/bin/python -m pytest -q tests/ecosystem

$(ECOSYSTEM)/.installed: pyproject.toml constraints.txt constraints-ecosystem.txt
	test -x $(ECOSYSTEM)/bin/python || $(PYTHON) -m venv $(ECOSYSTEM)
	$(ECOSYSTEM_INSTALL) torch setuptools
	$(ECOSYSTEM_INSTALL) --no-build-isolation -e . pytest pytest-timeout $(TRAINERS) $(LAUNCHERS) $(TORCHTITAN_NEEDS) \
		$(OLMO_CORE_NEEDS) $(DEEPSPEED_NEEDS)
	$(ECOSYSTEM_INSTALL) --no-deps $(UNRESOLVED)
	$(ECOSYSTEM_INSTALL) --no-deps --no-build-isolation deepspeed
	touch $@

gpu-report: $(STAMP) ## measure a machine with a GPU, into results/gpu/NAME: NAME=h100-pcie
	@test -n '$(NAME)' || { echo 'name the machine: make gpu-report NAME=h100-pcie'; exit 2; }
	$(BIN)/python -m benchmarks.gpu_report $(NAME)

test-torch: ## run the tests on another torch: VERSION=2.15.0, and PYTHON=python3.12, TESTS=tests/engines if need be
	@test -n '$(VERSION)' || { echo 'which torch? make test-torch VERSION=2.15.0 [PYTHON=python3.12] [TESTS=...]'; exit 2; }
	@$(MAKE) --no-print-directory $(OTHER)/.installed
	$(OTHER)/bin/python $(PYTEST) $(TESTS)

# All pins but those of torch and of triton, which torch chooses if no file pins them.
$(OTHER)/.installed: pyproject.toml constraints.txt $(OTHER_PINS)
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	{ grep -vE '^(torch|triton)==' constraints.txt; cat $(OTHER_PINS) /dev/null; } > $(OTHER)/constraints.txt
	$(OTHER_INSTALL) setuptools
	$(OTHER_INSTALL) --no-build-isolation -e '.[dev]'
	touch $@

test-pytorch: $(STAMP) ## run PyTorch's own FSDP2 tests, of the checkout PYTORCH, plain and attached
	$(BIN)/python -m tests.engines.fsdp2.pytorch_fsdp $(PYTORCH)

check: $(STAMP) ## lint code and prose, check the format, the order of imports and the types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m tests.prose
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

format: $(STAMP) ## format the code and apply safe lint fixes
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

clean: ## remove caches and build output; keeps .venv and runs
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find sdp4bit sdp4bit_megatron sdp4bit_deepspeed sdp4bit_lab tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
