# Two commands: `make demo` and `make test`. Each makes .venv itself; the second call installs nothing.
# Paths are relative throughout, so that a checkout may lie in a folder with a space in its name.

PYTHON ?= python3
RUN := .venv/bin/python -m
# A file at a time in each of two processes.
PYTEST := CUDA_VISIBLE_DEVICES= $(RUN) pytest --numprocesses 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-failed test-torch test-gpu test-launchers test-hosts test-peers test-torchs-own dist docs lint format stress stress-checkpoint stress-recovery stress-parameter-servers clean
.PHONY: bench-recovery soak-recovery bench-faults bench-checks soak soak-clean
.PHONY: bench-collectives bench-backend bench-hosts bench-step bench-reproducible bench-data-parallel bench-memory bench-sampler bench-records bench-checkpoint
.PHONY: bench-predict bench-meshes bench-compression bench-try bench-house bench-parameter-servers bench-start

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /    make \1|/p' Makefile | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

install: ## make .venv with everything the other targets need; they do it themselves
	@sh requirements/install.sh "$(PYTHON)"

demo: install ## train on handwritten digits with two replicas, and compare with one process
	$(RUN) evenstep run --nproc-per-node 2 examples/digits.py

test: lint ## lint, types, unit tests and a core of the others that touches every room; under 6 minutes on two cores
	$(PYTEST) --part core

test-all: install ## the tests that `make test` leaves out; some 15 minutes
	$(PYTEST) --part rest

test-failed: install ## what failed in the last run of tests, one after the other
	CUDA_VISIBLE_DEVICES= $(RUN) pytest --last-failed --last-failed-no-failures none

# An environment of its own for each pair, so that .venv stays as it is.
TORCH ?=
PART ?= core
TORCH_VENV = build/venv-torch-$(TORCH)-$(notdir $(PYTHON))
test-torch: ## the tests on another torch and python: TORCH=2.15.0 PYTHON=python3.12, PART=core or rest; see docs/reference/versions.md
	@test -n "$(TORCH)" || { echo "make test-torch: which torch? Such as: make test-torch TORCH=2.15.0 PYTHON=python3.12" >&2; exit 1; }
	@sh requirements/install.sh "$(PYTHON)" "$(TORCH_VENV)" "$(TORCH)"
	CUDA_VISIBLE_DEVICES= "$(TORCH_VENV)/bin/python" -m pytest --numprocesses 2 --dist loadfile --part $(PART)

test-gpu: install ## what needs a GPU: one is enough, over NCCL too; some minutes
	$(RUN) pytest tests/gpu

test-launchers: install ## the real mpiexec (Open MPI, MPICH) and srun; as root on Debian it installs them first
	@sh requirements/launchers.sh
	$(RUN) pytest tests/launchers

test-hosts: install ## faults of hosts, in network namespaces: late, cut off, failing, fewer; as root
	$(RUN) pytest tests/hosts

test-peers: install ## install accelerate, Lightning Fabric, datasets, webdataset, wandb and trackio into .venv, and train with them
	$(RUN) pip install --quiet --requirement requirements/peers.txt --constraint requirements/test.txt
	$(RUN) pytest tests/procs/transport/test_backend.py tests/procs/data/test_hugging_face.py tests/procs/docs/test_peers_pages.py -k other_libraries

test-torchs-own: install ## torch's own tests, from its wheel, with ours in place of torch's, on 2 to 4 ranks; some 40 minutes
	CUDA_VISIBLE_DEVICES= $(RUN) pytest tests/torchs_own

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

stress: install ## 1,000 random windows of the engine, 300 random trainings, 100 reproducible steps, 100,000 random collectives, also while ranks are stopped; over an hour
	$(RUN) tests.procs.replica.test_engine 1000
	$(RUN) tests.procs.replica.test_step_combinations 300
	$(RUN) tests.procs.replica.test_reproducible 100
	$(RUN) tests.procs.transport.test_stress 100000

bench-collectives: install ## shared memory against Gloo, 64 B to 256 MiB on 2 and 4 ranks; some minutes, on a quiet machine
	$(RUN:-m=) benchmarks/collectives.py --json build/collectives.json

bench-backend: install ## torch's DDP, FSDP2, tensor parallelism, compiled collectives, accelerate and Fabric over the backend, beside Gloo; some minutes, on a quiet machine
	$(RUN:-m=) benchmarks/backend.py --json build/backend.json

bench-hosts: install ## all-reduce over two hosts at 1 Gbit/s (network namespaces; needs root), against Gloo
	$(RUN:-m=) benchmarks/hosts.py --json build/hosts.json

bench-step: install ## what replication adds to a training step, beside torch's DDP; some minutes, on a quiet machine
	$(RUN:-m=) benchmarks/step.py --json build/step.json

bench-reproducible: install ## what reproducible mode costs, beside the ordinary one and accumulation; some minutes, on a quiet machine
	$(RUN:-m=) benchmarks/reproducible.py --json build/reproducible.json

bench-data-parallel: install ## two CPU replicas in one process against one; a minute, on a quiet machine
	$(RUN:-m=) benchmarks/data_parallel.py --json build/data_parallel.json

bench-sampler: install ## orders and loaders against torch's, 10^5 to 10^9 samples; some minutes, on a quiet machine
	$(RUN:-m=) benchmarks/sampler.py --json build/sampler.json

bench-records: install ## 2 GiB of records read shuffled, against in order, and in how much memory; needs 4 GiB of disk
	$(RUN:-m=) benchmarks/records.py --json build/records.json

bench-checkpoint: install ## saving and loading 500 MB, beside torch.save, torch.distributed.checkpoint and torch.load
	$(RUN:-m=) benchmarks/checkpoint.py --json build/checkpoint.json

stress-checkpoint: install ## 200 kills of all ranks at random instants, 30 that go on with another division of the model, 1,000 flipped bits, 100 truncations; some minutes
	$(RUN) tests.faults.kill_loop --kills 200
	$(RUN) tests.faults.mesh_kill_loop --kills 30
	EVENSTEP_TEST_FLIPS=1000 EVENSTEP_TEST_TRUNCATIONS=100 $(RUN) pytest -q -k "flipped or truncated" tests/unit/checkpoint/test_checkpointer.py

stress-parameter-servers: install ## 50 kills of random workers and servers of a training, every sample counted; some minutes
	$(RUN) tests.faults.server_kills --kills 50

bench-parameter-servers: install ## parameter servers on unequal and equal workers, RPC, accuracy; fifteen minutes, on a quiet machine
	$(RUN:-m=) benchmarks/parameter_servers.py --json build/parameter-servers.json

stress-recovery: install ## 300 kills of random ranks at random instants, which are replaced or not; some minutes
	$(RUN) tests.faults.recovery_loop --kills 300

soak-recovery: install ## 30 minutes in which a run loses a rank every ten seconds, compared with one that loses none
	$(RUN) tests.faults.recovery_loop --soak-minutes 30

bench-recovery: install ## what a lost rank costs, beside torchft if TORCHFT=.../bin/python has it; 5 and 500 MB; 8 minutes
	$(RUN:-m=) benchmarks/recovery.py --repeats-large 2 $(if $(TORCHFT),--torchft $(TORCHFT)) --json build/recovery.json

bench-faults: install ## faults at every phase, rank and transport, 200 cascades, torch's DDP beside; 40 minutes
	$(RUN:-m=) benchmarks/faults.py --recoveries 20 --cascades 200 --ddp-cascades 10 --json build/faults.json

bench-checks: install ## what watching costs a step of the GPT, by accounting; fails above 0.5 %
	$(RUN:-m=) benchmarks/checks.py --json build/checks.json

SOAK_MINUTES ?= 30
soak: install ## a fault of chance every ten seconds for SOAK_MINUTES=30; ends as if left alone, bit for bit
	$(RUN) tests.faults.soak --minutes $(SOAK_MINUTES)

SOAK_STEPS ?= 100000
soak-clean: install ## SOAK_STEPS=100000 steps with twice as many ranks as cores, and pauses: no false alarm
	$(RUN) tests.faults.soak --clean-steps $(SOAK_STEPS)

bench-memory: install ## memory per rank: parameters, gradients, optimizer, buckets, peak; a minute
	$(RUN:-m=) benchmarks/memory.py --json build/memory.json

bench-meshes: install ## a step of torch's FSDP2 over Gloo, over our backend, and under our loop; a minute, on a quiet machine
	$(RUN:-m=) benchmarks/meshes.py --json build/meshes.json

bench-compression: install ## compression hooks of torch's over two hosts at 1 Gbit/s, beside torch's DDP (network namespaces; needs root)
	$(RUN:-m=) benchmarks/compression.py --json build/compression.json

bench-predict: install ## steps of four ranks predicted from one and two, then measured (network namespaces; needs root); some minutes
	$(RUN:-m=) benchmarks/predict.py --json build/predict.json

bench-try: install ## `bench run --try` on five scripts that don't scale: predicted and measured gains (network namespaces; needs root)
	$(RUN:-m=) benchmarks/remedies.py --json build/try.json

bench-start: install ## from the command to the first barrier: `evenstep run` beside torchrun, and the imports; two minutes, on a quiet machine
	$(RUN:-m=) benchmarks/start.py --json build/start.json

AGAINST ?= HEAD~1
bench-house: install ## lines, folders, imports and private names of torch, beside those of the commit AGAINST=HEAD~1
	$(RUN:-m=) benchmarks/house.py --against $(AGAINST) --json build/house.json

clean: ## remove .venv, caches and what the examples wrote
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist runs src/evenstep.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
