# SPDX-License-Identifier: Apache-2.0
# Every target sets up .venv first if it is missing or out of date. `make` alone lists the targets.
.DEFAULT_GOAL := help
.PHONY: help setup launch-setup demo check lint unit functional test docs models formats vocabulary recipes recipe-configs parity examples figures rules pictures bench lock clean

BIN := .venv/bin
# pyright runs from its wheel; without this it asks a server whether a newer one exists.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# Images often set this; a process then compiles all that it imports, 2 of the 5 seconds that a run takes to start.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -q -o faulthandler_timeout=300
# What is resolved by `make lock`: packages published before this day.
LOCK_DATE ?= $(shell date -u +%F)
# The newest torch whose CUDA the drivers of GPU test machines run, where pyproject.toml allows newer ones.
LOCK_TORCH := torch==2.11.0

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

setup:  ## make or update .venv from requirements.lock
	@scripts/setup.sh

launch-setup: setup  ## make or update .venv-launch, which has NeMo-Run too
	@scripts/setup.sh launch

demo: setup  ## convert, fine-tune and export a real model (ARGS="--steps 100 --out DIR")
	@$(BIN)/python -m scripts.demo $(ARGS)

check: lint unit  ## format, lint, types, import layers, fast tests (before every commit)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright

unit: setup
	$(PYTEST) -n 2 -m "not (slow or gpu or network)" tests/unit_tests

functional: setup
	@for name in resiliency energon trackers eval serve storage te audio tinker vlm otel verl calibrate; do \
	    scripts/extra.sh $$name || echo "tests of $$name will be skipped: scripts/extra.sh $$name failed"; \
	done
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "not (slow or gpu or network)" tests/functional_tests

test: unit functional  ## what CI runs: unit tests, then tests over several processes

docs: setup  ## build the documentation into site/, strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

models: setup  ## write the table of docs/models.md from the registry
	$(BIN)/python -m scripts.docs.supported_models

formats: setup  ## write the table of quantized formats into docs/low-precision.md
	$(BIN)/python -m scripts.docs.written_formats

vocabulary: setup  ## write the tables of blocks, fields and settings into docs/adding-a-family.md
	$(BIN)/python -m scripts.docs.vocabulary

recipes: setup  ## write memory and table of the recipes (ONLY="words": memory of these; ONLY=-: of none)
	$(BIN)/python -m scripts.docs.recipes $(ONLY)
	$(BIN)/python -m scripts.docs.family_pages

recipe-configs: setup  ## write the models of recipes from the published configs in tests/families
	$(BIN)/python -m scripts.docs.recipe_configs

parity: setup  ## compare all layouts with one process and write docs/parity.md (ONLY="words": models with one of these)
	$(BIN)/python -m scripts.docs.parity $(ONLY)

examples: setup  ## write the generated part of examples/models/<family>/README.md
	$(BIN)/python -m scripts.docs.family_pages

figures: setup  ## write docs/figures.tsv into README.md and docs/index.md
	$(BIN)/python -m scripts.docs.figures

rules: setup  ## write the table of rules into docs/command-line.md
	$(BIN)/python -m scripts.docs.rules

pictures: setup  ## draw docs/pictures
	$(BIN)/python -m scripts.docs.pictures

bench: setup  ## measure conversion and training against their references
	$(BIN)/python -m benchmarks

lock:  ## resolve the dependencies of pyproject.toml anew into requirements.lock
	echo $(LOCK_TORCH) | scripts/uv.sh pip compile pyproject.toml --constraint /dev/stdin --quiet --upgrade --group dev --group docs --universal \
	    --generate-hashes --no-emit-index-url --no-header --python-version 3.12 \
	    --exclude-newer $(LOCK_DATE) -o requirements.lock
	echo $(LOCK_TORCH) | scripts/uv.sh pip compile pyproject.toml --constraint /dev/stdin --quiet --upgrade --extra launch --universal \
	    --generate-hashes --no-emit-index-url --no-header --python-version 3.12 \
	    --exclude-newer $(LOCK_DATE) -o requirements-launch.lock

clean:  ## remove what was built, but not .venv nor downloads
	rm -rf build site .pytest_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find src tests scripts examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
