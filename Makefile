# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
BIN := .venv/bin
DEMO_RUN := runs/demo

.PHONY: setup demo test quick slow gpu smoke lint type fmt check clean

setup: .venv/.complete

.venv/.complete: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[train,dev]'
	touch $@

demo: setup  ## questions to preference pairs in the demo world, with a tiny policy, on a CPU
	$(BIN)/reasonrag build-tree --preset demo --limit 200 --seed 0 --out $(DEMO_RUN)

test: setup  ## everything that needs no GPU
	$(BIN)/pytest -m "not gpu"

quick: setup  ## what to run on every save
	$(BIN)/pytest -q -m "not slow and not gpu"

slow: setup
	$(BIN)/pytest -m "slow and not gpu"

gpu: setup
	$(BIN)/pytest -m gpu

smoke: setup  ## a run and its pairs derived anew, in seconds
	rm -rf runs/smoke
	$(BIN)/reasonrag build-tree --preset demo --limit 5 --seed 0 --out runs/smoke
	$(BIN)/reasonrag pairs runs/smoke --min-margin 0.05

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: setup
	$(BIN)/mypy

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint type test

clean:
	rm -rf runs/demo runs/smoke
