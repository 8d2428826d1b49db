# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/full-demo

.DEFAULT_GOAL := help
# `make test WORKERS=8` on a larger machine; `make quick TESTS=tests/mcts` for one room.
WORKERS ?= 2
TESTS ?=
# Compiled modules are kept even where the environment says not to: every run and every process would compile them anew.
export PYTHONDONTWRITEBYTECODE :=
# A worker that dies ends the run: with another one in its place, xdist may wait for ever for files that are done.
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: help setup demo online test quick slow gpu smoke coverage docs bench bench-gpu peers faults audit newest house lint type fmt check wheel clean

help:  ## print the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: .venv/.complete  ## create .venv with everything that tests need

.venv/.complete: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	# `compat`: else a clone's folder of the same name hides the package from what runs in the folder that holds it.
	$(BIN)/python -m pip install --quiet -c constraints.txt -C editable_mode=compat -e '.[train,dense,serve,docs,dev]'
	touch $@

# The whole story in the demo world, on a CPU: a tiny policy, trees over training questions, preference pairs, DPO (and
# SFT, its rival), and all three on questions that name no entity which a training question names. Each line can be
# repeated on real data: give --dataset, --corpus and --policy (or --model) instead of --preset demo.
demo: setup  ## trees, pairs, SFT, DPO and an evaluation in the demo world, on a CPU, in minutes
	$(BIN)/reasonrag build-tree --preset demo --seed 0 --out $(DEMO)/trees
	$(BIN)/reasonrag sft train --preset demo --data $(DEMO)/trees --out $(DEMO)/sft
	$(BIN)/reasonrag dpo train --preset demo --data $(DEMO)/trees --out $(DEMO)/dpo
	$(BIN)/reasonrag eval --preset demo --split test --limit 500 --temperature 0,1 --out $(DEMO)/eval \
	    --policy base=demo --policy sft=hf:$(DEMO)/sft --policy dpo=hf:$(DEMO)/dpo

# The online stage goes on from the demo's DPO policy, in its own format; then all three on held-out questions.
online: demo  ## base, DPO, then GRPO on the policy that DPO made: one table
	$(BIN)/reasonrag rl train --preset demo-reasonrag --model $(DEMO)/dpo --out $(DEMO)/online
	$(BIN)/reasonrag eval --preset demo --split test --limit 500 --temperature 0,1 --out $(DEMO)/online-eval \
	    --policy base=demo --policy dpo=hf:$(DEMO)/dpo --policy online=hf:$(DEMO)/online

test: setup  ## every test that needs no GPU
	$(PYTEST) -m "not gpu" $(TESTS)

quick: setup  ## the tests to run on every save
	$(PYTEST) -q -m "not slow and not gpu" $(TESTS)

slow: setup  ## only the slow tests
	$(PYTEST) -m "slow and not gpu" $(TESTS)

gpu: setup  ## only the tests that need a CUDA device; writes row 20b of docs/results/faults.md
	$(BIN)/pytest -m gpu --faults $(TESTS)

coverage: setup  ## branch coverage of the whole suite, subprocesses included; the report in build/coverage
	$(PYTEST) -q -m "not gpu" --cov --cov-report=term --cov-report=html:build/coverage $(TESTS)

smoke: setup  ## every step of the demo, in a minute
	rm -rf runs/smoke
	$(BIN)/reasonrag build-tree --preset demo --limit 20 --seed 0 --out runs/smoke/trees
	$(BIN)/reasonrag pairs runs/smoke/trees --min-margin 0.05
	$(BIN)/reasonrag dpo train --preset demo --data runs/smoke/trees --out runs/smoke/dpo
	$(BIN)/reasonrag eval --preset demo --limit 20 --out runs/smoke/eval --policy base=demo --policy dpo=hf:runs/smoke/dpo
	$(BIN)/reasonrag rl train --preset demo-reasonrag --model runs/smoke/dpo --max-steps 2 --questions-per-step 2 \
	    --batch-size 16 --out runs/smoke/steps
	$(BIN)/reasonrag rl train --preset demo-hiprag --max-steps 2 --out runs/smoke/online
	$(BIN)/reasonrag eval --preset demo --limit 20 --out runs/smoke/online-eval --judge demo-judge \
	    --policy base=demo:hiprag --policy online=hf:runs/smoke/online

docs: setup  ## write the reference pages from the code, then the site in build/site
	$(BIN)/python -m docs.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: setup build/benchmarks/numba  ## the quick benchmarks, within 6 minutes; writes docs/results/performance.md
	$(BIN)/python -m benchmarks

bench-gpu: setup  ## what needs an NVIDIA GPU, within 9 minutes
	$(BIN)/python -m benchmarks gpu

# What bm25s is measured with. It stays out of .venv, where each import of bm25s would import it too, in 0.3 s.
build/benchmarks/numba:
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt --target $@ numba llvmlite

peers: setup  ## run other people's tools on what we write: `make peers CHECKS="verl trl"`; docs/results/peers.md
	$(BIN)/python -m tools.peers $(CHECKS)

faults: setup  ## every row of the fault matrix at full size, in about an hour on two cores; docs/results/faults.md
	$(PYTEST) -q -m "fault and not gpu" --faults $(TESTS)

audit: build/audit/bin/pip-audit  ## known vulnerabilities of what constraints.txt pins, as pypi.org lists them
	build/audit/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt

build/audit/bin/pip-audit:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet pip-audit

# In an environment of its own, whatever bound pyproject.toml has: it shows what a release changes before a user meets it.
newest: build/newest/.complete  ## the tests of what we use inside of TRL and PEFT, with their newest releases
	build/newest/bin/python -m pip install --quiet --upgrade --no-deps trl peft
	build/newest/bin/python -m pytest -q tests/tools/test_private_names.py tests/dpo/test_trainer.py \
	    tests/online_rl/test_trainer.py tests/online_rl/test_train.py tests/llm/test_weight_transfer.py

build/newest/.complete: pyproject.toml constraints.txt
	$(PYTHON) -m venv build/newest
	build/newest/bin/python -m pip install --quiet -c constraints.txt -C editable_mode=compat -e '.[train,serve,dev]'
	touch $@

house: setup  ## measure the structure of the package
	$(BIN)/python -m tools.house

lint: setup  ## style, format, which room may use which, no circles, and the budget of lines
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m tools.house --check

type: setup  ## mypy --strict
	$(BIN)/mypy

fmt: setup  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint type test  ## what CI runs

wheel: setup  ## build the wheel, install it into a fresh environment without extras, and run it
	rm -rf build/wheel dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet -c constraints.txt dist/*.whl
	cd build && wheel/bin/reasonrag --version && wheel/bin/python -c 'import reasonrag; print(reasonrag.__all__)'

clean:  ## delete what these targets wrote
	rm -rf $(DEMO) runs/smoke build dist
