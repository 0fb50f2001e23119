# Two commands: `make demo` and `make test`. Each makes .venv itself; the second call installs nothing.
# Paths are relative throughout, so that a checkout may lie in a folder with a space in its name.

PYTHON ?= python3
RUN := .venv/bin/python -m

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format bench-collectives bench-step bench-data-parallel bench-memory clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /    make \1|/p' Makefile | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

install: ## make .venv with everything the other targets need; they do it themselves
	@sh requirements/install.sh "$(PYTHON)"

demo: install ## train on handwritten digits with two replicas, and compare with one process
	$(RUN) evenstep run --nproc-per-node 2 examples/digits.py

test: lint ## lint, types and all tests, a file at a time in each of two processes
	$(RUN) pytest --numprocesses 2 --dist loadfile

lint: install ## ruff (format and rules) and mypy --strict
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy

format: install ## let ruff format the code and sort the imports
	$(RUN) ruff check --select I --fix .
	$(RUN) ruff format .

bench-collectives: install ## shared memory against Gloo, 64 B to 256 MiB on 2 and 4 ranks; some minutes, on a quiet machine
	$(RUN:-m=) benchmarks/collectives.py --json build/collectives.json

bench-step: install ## what replication adds to a training step, beside torch's DDP; some minutes, on a quiet machine
	$(RUN:-m=) benchmarks/step.py --json build/step.json

bench-data-parallel: install ## two CPU replicas in one process against one; a minute, on a quiet machine
	$(RUN:-m=) benchmarks/data_parallel.py --json build/data_parallel.json

bench-memory: install ## memory per rank: parameters, gradients, optimizer, buckets, peak; a minute
	$(RUN:-m=) benchmarks/memory.py --json build/memory.json

clean: ## remove .venv, caches and what the examples wrote
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build runs src/evenstep.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
