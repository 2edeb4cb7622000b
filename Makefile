# Two commands, each doing all its own set-up: make test, make demo.
PYTHON ?= $(shell command -v python3.11 || command -v python3)

.PHONY: test demo test-gpu clean

test:
	@$(PYTHON) scripts/setup.py --tests
	@.venv/bin/python scripts/run_tests.py

demo:
	@$(PYTHON) scripts/setup.py
	@.venv/bin/python scripts/demo.py

# Needs no set-up and no network: runs in the interpreter that has a CUDA build of torch, and pytest.
test-gpu:
	@$(PYTHON) scripts/run_tests.py --gpu

clean:
	rm -rf .venv .cache demo
