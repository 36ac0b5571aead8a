# The project's verbs. Everything runs from .venv, which `setup` makes.
MODEL ?= models/demo
PORT ?= 8000
STATE ?= .state
BIN := .venv/bin

.PHONY: setup proto lint test test-unit soak demo up down
.DEFAULT_GOAL := demo

setup:
	@scripts/setup.sh

proto: setup
	$(BIN)/python scripts/gen_proto.py

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python scripts/gen_proto.py --check

test: setup
	$(BIN)/python -m pytest

test-unit: setup
	$(BIN)/python -m pytest tests/unit tests/contract

soak: setup
	$(BIN)/python -m pytest -m soak

demo: setup
	@$(BIN)/k3mesh demo

up: setup
	@test -e $(MODEL)/config.json || $(BIN)/k3mesh make-checkpoint $(MODEL)
	@$(BIN)/k3mesh up --topology laptop --model $(MODEL) --port $(PORT) --state-dir $(STATE)

down:
	@$(BIN)/k3mesh down --state-dir $(STATE)
