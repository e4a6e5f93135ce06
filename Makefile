# make demo   sets up .venv and trains the demo adapter (minutes on a CPU)
# make test   sets up or reuses .venv, checks the code and runs the tests
# make lint   only the checks
# Another Python: make demo PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test lint

demo: .venv/installed
	$(BIN)/snakemake --profile packs/demo
	@echo
	@$(BIN)/python -c "import json; m = json.load(open('runs/demo/eval.json'))['metrics']; \
	print(f\"Validation cosine {m['cos']:.4f} (mean baseline {m['baseline_cos']:.4f})\"); \
	print(f\"On prompts of other kinds {m['probe_cos']:.4f}\")"
	@echo "Adapter  $(CURDIR)/runs/pig_demo_adapter-f16.gguf"
	@echo "Report   $(CURDIR)/runs/demo/report.html (open it in a browser)"

test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# Packs of LoRAs want pictures; lora_demo, which brings some, has the same rules.
lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile rules
	for pack in $(filter-out %_lora,$(wildcard packs/*)); do $(BIN)/snakemake --profile $$pack --lint || exit 1; done

# Done again only when a lock file changed. PyTorch is kept if the version in the lock is there already.
.venv/installed: requirements.lock requirements-demo.lock
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'gguf-trainer needs Python 3.11 or newer, and \
	$(PYTHON) is %d.%d; name another one: make PYTHON=python3.12 ...' % sys.version_info[:2])"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -r requirements.lock
	$(BIN)/python -m pip install --no-deps -r requirements-demo.lock
	@touch $@
