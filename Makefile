# Two commands: `make demo` and `make test`. Each makes .venv itself; the second call installs nothing.
# Paths are relative throughout, so that a checkout may lie in a folder with a space in its name.

PYTHON ?= python3
RUN := .venv/bin/python -m
# A file at a time in each of two processes.
PYTEST := CUDA_VISIBLE_DEVICES= $(RUN) pytest --numprocesses 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-gpu test-launchers test-hosts test-peers test-torch stress bench docs lint
.PHONY: format dist clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /    make \1|/p' Makefile | awk -F'|' '{ printf "%-24s %s\n", $$1, $$2 }'

install: ## make .venv with everything the other targets need; they do it themselves
	@sh requirements/install.sh "$(PYTHON)"

demo: install ## train on handwritten digits with two replicas, and compare with one process
	$(RUN) evenstep run --nproc-per-node 2 examples/digits.py

test: lint ## lint, types, unit tests and a core of the others that touches every room; some 7 minutes on two cores
	$(PYTEST) --part core

test-all: install ## the tests that `make test` leaves out; some 35 minutes
	$(PYTEST) --part rest

# An environment of its own for each pair, so that .venv stays as it is. PART=own plays torch's own tests, from its wheel,
# with our classes in place of torch's; without TORCH it does so in .venv. See docs/reference/versions.md.
TORCH_VENV = $(if $(TORCH),build/venv-torch-$(TORCH)-$(notdir $(PYTHON)),.venv)
test-torch: ## the tests with another torch: TORCH=2.15.0 PYTHON=python3.12 PART=core, rest, or own for torch's own tests
	@test -n "$(TORCH)$(filter own,$(PART))" || { echo "make test-torch: which torch? Such as: make test-torch TORCH=2.15.0 PYTHON=python3.12" >&2; exit 1; }
	@sh requirements/install.sh "$(PYTHON)" "$(TORCH_VENV)" "$(TORCH)"
	CUDA_VISIBLE_DEVICES= "$(TORCH_VENV)/bin/python" -m pytest $(if $(filter own,$(PART)),tests/torchs_own,--numprocesses 2 --dist loadfile --part $(or $(PART),core))

test-gpu: install ## what needs a GPU: one is enough, over NCCL too; some minutes
	$(RUN) pytest tests/gpu

test-launchers: install ## the real mpiexec (Open MPI, MPICH) and srun; as root on Debian it installs them first
	@sh requirements/launchers.sh
	$(RUN) pytest tests/launchers

test-hosts: install ## faults of hosts, in network namespaces: late, cut off, failing, fewer; as root
	$(RUN) pytest tests/hosts

test-peers: install ## install the libraries of requirements/peers.txt into .venv, and train with them
	$(RUN) pip install --quiet --requirement requirements/peers.txt --constraint requirements/test.txt
	$(RUN) pytest tests/procs/transport/test_backend.py tests/procs/data tests/procs/optim/test_sharded_kinds.py tests/procs/docs/test_peers_pages.py -k other_libraries

dist: install ## build the source distribution and the wheel into dist/, and check what they say of themselves
	$(RUN) pip install --quiet --requirement requirements/dist.txt --constraint requirements/test.txt
	$(RUN) build --quiet .
	$(RUN) twine check --strict dist/evenstep-*

docs: install ## build the site of docs/ into build/docs, without a warning
	$(RUN) pip install --quiet --requirement docs/requirements.txt --constraint requirements/test.txt
	$(RUN) sphinx -q -W --keep-going -b html docs build/docs

lint: install ## ruff (format and rules) and mypy --strict
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy

format: install ## let ruff format the code and sort the imports
	$(RUN) ruff check --select I --fix .
	$(RUN) ruff format .

# The parts of `make stress`. ARGS goes to those that are one program: PART=soak ARGS="--minutes 5".
define stress_engine
$(RUN) tests.procs.replica.test_engine 1000
$(RUN) tests.procs.replica.test_step_combinations 300
$(RUN) tests.procs.replica.test_reproducible 100
endef
define stress_collectives
$(RUN) tests.procs.transport.test_stress 100000
$(RUN) tests.faults.test_interrupts 1000
endef
define stress_checkpoint
EVENSTEP_TEST_FLIPS=1000 $(RUN) pytest -q --timeout=0 -k flipped tests/unit/checkpoint/test_checkpointer.py
endef
define stress_kills
$(RUN) tests.faults.kill_loop --kills 200
$(RUN) tests.faults.kill_loop --kills 50 --s3
$(RUN) tests.faults.mesh_kill_loop --kills 30
$(RUN) tests.faults.data_kill_loop --kills 60
$(foreach kind,plain sharded fsdp2,$(RUN) tests.faults.tier_kill_loop --kind $(kind) --kills 30 &&) true
endef
define stress_ends
$(RUN) tests.faults.random_ends --runs 300 $(ARGS)
endef
define stress_servers
$(RUN) tests.faults.server_kills --kills 50 $(ARGS)
$(RUN) tests.procs.parameter_servers.test_messages 10000
$(RUN) tests.hosts.test_servers
endef
define stress_soak
$(RUN) tests.faults.soak --minutes 30 $(ARGS)
endef
define stress_clean
$(RUN) tests.faults.soak --clean-steps 100000 $(ARGS)
endef

STRESS := engine collectives checkpoint kills ends servers soak clean
stress: ## long tests, PART=engine, collectives, checkpoint, kills, ends, servers, soak or clean; docs/contributing/tests.md describes them
	$(call one_of,PART,$(STRESS))
	@sh requirements/install.sh "$(PYTHON)"
	$(stress_$(PART))

BENCHMARKS := step libraries collectives hosts diloco backend start recovery sampler parameter_servers checkpoint checks faults
bench: ## one benchmark, NAME=step, into build/step.json; ARGS=--help says what it measures, a wrong NAME lists all
	$(call one_of,NAME,$(BENCHMARKS))
	@sh requirements/install.sh "$(PYTHON)"
	$(RUN:-m=) benchmarks/$(NAME).py --json build/$(NAME).json $(ARGS)

# Stops with a list unless the variable named $(1) is exactly one of the words in $(2).
one_of = @test "$(words $($(1))) $(words $(filter $(2),$($(1))))" = "1 1" || { echo "make $@: $(1) is one of $(2)" >&2; exit 1; }

clean: ## remove .venv, caches and what the examples wrote
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist runs src/evenstep.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
