# make demo | make test | make test-all | make check | make docs | make bench: each sets up what it needs on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export OMP_WAIT_POLICY := PASSIVE
export OMP_NUM_THREADS := 1

.PHONY: demo test test-all check docs lock bench clean

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,flower,hub,lite,medical,monai,onnx,privacy,watch]'
	touch $(READY)

demo: $(READY)
	$(BIN)/equipoise demo --out demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'slow or not slow'

check: $(READY)
	$(BIN)/ruff check src tests benchmarks docs setup.py
	$(BIN)/ruff format --check src tests benchmarks docs setup.py
	$(BIN)/mypy
	$(BIN)/python benchmarks/prose.py
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/package.py

docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict --quiet --site-dir site
	@echo "the pages are in site/"

# after a change of constraints.txt or pyproject.toml
lock: $(READY)
	$(BIN)/uv pip compile --quiet pyproject.toml --extra dev --extra flower --extra hub --extra lite --extra medical --extra monai --extra onnx --extra privacy --extra watch --extra docs \
		--constraint constraints.txt --universal --python-version 3.11 --generate-hashes --no-annotate \
		--no-emit-index-url --custom-compile-command 'make lock' --output-file constraints-hashed.txt

bench: $(READY)
	$(BIN)/python benchmarks/bench.py

clean:
	rm -rf demo build dist site src/*.egg-info
