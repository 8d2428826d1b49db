# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/demo

.PHONY: setup demo online test quick slow gpu smoke docs lint type fmt check clean

setup: .venv/.complete

.venv/.complete: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[train,dense,serve,docs,dev]'
	touch $@

# The whole story in the demo world, on a CPU: a tiny policy, trees over training questions, preference pairs, DPO (and
# SFT, its rival), and all three on questions about entities that no training question touches. Each line can be
# repeated on real data: give --dataset, --corpus and --policy (or --model) instead of --preset demo.
demo: setup
	$(BIN)/reasonrag build-tree --preset demo --seed 0 --out $(DEMO)/trees
	$(BIN)/reasonrag sft train --preset demo --data $(DEMO)/trees --out $(DEMO)/sft
	$(BIN)/reasonrag dpo train --preset demo --data $(DEMO)/trees --out $(DEMO)/dpo
	$(BIN)/reasonrag eval --preset demo --split test --limit 500 --temperature 0,1 --out $(DEMO)/eval \
	    --policy base=demo --policy sft=hf:$(DEMO)/sft --policy dpo=hf:$(DEMO)/dpo

# The online stage, in the same world: GRPO on outcomes, then before and after on held-out questions.
online: setup
	$(BIN)/reasonrag rl train --preset demo-outcome --out $(DEMO)/online
	$(BIN)/reasonrag eval --dataset demo --split test --limit 500 --temperature 0,1 --out $(DEMO)/online-eval \
	    --policy base=demo:search_r1 --policy grpo=hf:$(DEMO)/online --policy best=hf:$(DEMO)/online/best

test: setup  ## everything that needs no GPU
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu"

quick: setup  ## what to run on every save
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu"

slow: setup
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "slow and not gpu"

gpu: setup
	$(BIN)/pytest -m gpu

smoke: setup  ## every step of the demo, in a minute
	rm -rf runs/smoke
	$(BIN)/reasonrag build-tree --preset demo --limit 20 --seed 0 --out runs/smoke/trees
	$(BIN)/reasonrag pairs runs/smoke/trees --min-margin 0.05
	$(BIN)/reasonrag dpo train --preset demo --data runs/smoke/trees --out runs/smoke/dpo
	$(BIN)/reasonrag eval --preset demo --limit 20 --out runs/smoke/eval --policy base=demo --policy dpo=hf:runs/smoke/dpo
	$(BIN)/reasonrag rl train --preset demo-hiprag --max-steps 2 --out runs/smoke/online
	$(BIN)/reasonrag eval --preset demo --limit 20 --out runs/smoke/online-eval --judge demo-judge \
	    --policy base=demo:hiprag --policy online=hf:runs/smoke/online

docs: setup  ## the documentation as a site, in build/site; its reference pages are written from the code
	$(BIN)/python -m docs.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

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
	rm -rf runs/demo runs/smoke build
