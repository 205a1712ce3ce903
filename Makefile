# make wheel    a released vLLM in, a patched wheel and its diff out, in dist/
# make test     every test that this machine can run
VLLM ?= 0.33.0
PYTHON ?= python3
BIN = .venv/bin

.PHONY: wheel test lint clean

wheel: .venv/tool
	$(BIN)/vllm-pinned wheel --out dist $(VLLM)

test: .venv/test
	$(BIN)/python -m pytest $(TESTS)

lint: .venv/test
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

.venv/uv:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet uv
	touch $@

.venv/tool: .venv/uv pyproject.toml
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable .
	touch $@

.venv/test: .venv/tool
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[test]'
	touch $@

clean:
	rm -rf .venv dist
