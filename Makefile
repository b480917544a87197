# Two commands are all the set-up there is: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test quick lint docs lock clean

demo: $(READY)  ## the main job on SmolLM2-135M: writes demo-report/report.html
	$(BIN)/glu-probe demo -o demo-report

# A thread a worker: several workers with several threads each get in each other's way.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

test: $(READY) lint  ## everything, the two real models included
	$(ONE_THREAD) $(BIN)/python -m pytest -n auto -q -m "not slow"
	$(ONE_THREAD) $(BIN)/python -m pytest -n auto -q -m slow --ignore=tests/test_real_models.py
	$(BIN)/python -m pytest -q tests/test_real_models.py
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=300 -q notebooks -W ignore

quick: $(READY)  ## the tests that need no pretrained model
	$(ONE_THREAD) $(BIN)/python -m pytest -n auto -q -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: $(READY)  ## pages of every public name: build/docs/index.html
	$(BIN)/python -W error -m pdoc --docformat google glu_probe -o build/docs

$(READY): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $(READY)

lock:  ## resolve the newest versions anew and pin them, with the CPU build of torch
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install -q "pip>=25.1" setuptools
	.venv-lock/bin/python -m pip install -q torch==2.13.0
	.venv-lock/bin/python -m pip install -q --no-build-isolation -e . --group test --group docs
	.venv-lock/bin/python -m pip freeze --all --exclude-editable | grep -viE '^pip==' | sed 's/+cpu//' > requirements.lock
	rm -r .venv-lock

clean:
	rm -rf $(VENV) build dist *.egg-info demo-report
