# Every target sets up what it needs: a virtual environment in .venv, made again only when the requirements change.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DOCS   := $(VENV)/.docs

.PHONY: demo test lint types kernels docs first-device wheel ci clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cli,dev]'
	touch $@

demo: $(READY)      ## train on real text: dense against 1D, 2D and 3D on eight local ranks
	$(BIN)/ndtp demo --output demo_output

ON_DEVICE = checkpoints compute integrations models nn ops pipelines runtime schedule split

# Hundreds of processes import ndtp and the tests: each would compile them again where no bytecode may be kept.
test: $(READY)      ## the whole test suite, two files of it at a time; DEVICE=cuda or emulated: what has tensors, there
ifeq ($(DEVICE),cuda)
	$(BIN)/python tests/on_device.py $(addprefix tests/,$(ON_DEVICE))
else
	env -u PYTHONDONTWRITEBYTECODE $(if $(DEVICE),NDTP_TEST_DEVICE=$(DEVICE)) $(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(if $(JUNIT),--junitxml=$(JUNIT)) $(if $(DEVICE),$(addprefix tests/,$(ON_DEVICE)))
endif

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

kernels: $(READY)   ## compile the Triton kernels ahead of time for every target; no GPU needed
	$(BIN)/python -m ndtp_kernels.tools.aot --compare docs/kernels.md

$(DOCS): $(READY)   # mkdocs is installed for the site alone
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(DOCS)       ## the documentation site, in build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

first-device: $(READY)  ## every step of the first hour on a GPU, as far as it goes without one
	PYTHON=$(BIN)/python bench/first_device.sh --dry-run

wheel: $(READY)     ## build the wheel and import it from outside the repository
	./.ci/check-wheel $(BIN)/python

# What runs on one processor runs two at a time, before what takes all of them.
ci: export NDTP_LONG_TESTS = 2
ci: $(DOCS)
	$(MAKE) --jobs=2 --output-sync=target first-device lint types docs wheel
	$(MAKE) test kernels demo

clean:
	rm -rf $(VENV) build dist demo_output *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
