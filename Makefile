# make demo: the main job on a real file, from a fresh clone.   make test: the whole test suite.
# make examples: the files that README.md names, in build/examples.
# make docs: docs/cli.md and docs/api.md, what the cookbook's commands print, and docs/pictures.
# make fixtures: the trained checkpoints of fixtures/, by ckptool's own trainer.
# make package: the sdist and the wheel, tried with and without torch, and how to publish them.
# All set up a private environment first. PYTHON chooses the interpreter (3.11 or newer).

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
DEMO = build/demo

# Modules are compiled once, whatever the surroundings say: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo examples test lint docs fixtures bench compat packages package soak clean

# Made once, renewed when what it depends on changes: what ckptool needs, and what its tests need.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (the first time takes a minute or two) ..."
	@$(PIP) -e .
	@touch $@

$(VENV)/.ready: $(VENV)/.installed
	@$(PIP) -e '.[test]'
	@touch $@

define LOAD
import sys, torch
from torch import nn
net = nn.ModuleDict({"conv1": nn.Conv2d(3, 8, 3), "bn1": nn.BatchNorm2d(8), "fc": nn.Linear(8, 10)})
path, *device = sys.argv[1:]
call = repr(path) + "".join(f", map_location={one!r}" for one in device)
print(f"\n>>> net.load_state_dict(torch.load({call})['state_dict'])")
try:
    print(net.load_state_dict(torch.load(path, *device, weights_only=True)["state_dict"]))
except RuntimeError as error:
    print(f"RuntimeError: {str(error)[:400]} ...")
print()
endef
export LOAD

demo: $(VENV)/.installed
	@rm -rf $(DEMO) && mkdir -p $(DEMO)
	@cp fixtures/torch-2.13.0/dp_full_cuda3.pth $(DEMO)/model.pth
	@$(BIN)/python -W ignore -c "$$LOAD" $(DEMO)/model.pth cpu
	@$(BIN)/python -W ignore -c "$$LOAD" $(DEMO)/model.pth
	$(BIN)/ckptool strip-module $(DEMO)/model.pth
	$(BIN)/ckptool remap --to cpu $(DEMO)/model.stripped.pth -o $(DEMO)/laptop.pth
	@$(BIN)/python -W ignore -c "$$LOAD" $(DEMO)/laptop.pth

examples: $(VENV)/.installed
	@$(BIN)/python -W ignore -m tests.pages.prepared build/examples
	@echo "the files that README.md names are in build/examples"

test: $(VENV)/.ready
	@# These fork at every call of the system, which takes a third of the time without torch in memory.
	$(BIN)/python -m pytest -n 2 tests/files
	$(BIN)/python -m pytest -n 2 tests --ignore=tests/files

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.ready
	$(BIN)/python -m tests.pages

fixtures: $(VENV)/.ready
	$(BIN)/python fixtures/make/trained.py fixtures/trained

bench: $(VENV)/.ready
	@$(PIP) -e '.[test,bench]'
	$(BIN)/python -m benchmarks $(ARGS)

compat: $(VENV)/.ready
	$(BIN)/python tests/compat/run.py $(ARGS)
	$(BIN)/python tests/compat/folders.py
	$(BIN)/python tests/compat/xla.py

packages: $(VENV)/.ready
	$(BIN)/python tests/compat/packages.py $(ARGS)

package: $(VENV)/.ready
	.ci/package $(abspath $(BIN))/python

soak: $(VENV)/.ready
	@$(PIP) -e '.[test,soak]'
	$(BIN)/python -m tests.soak $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
