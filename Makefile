# Two commands are all the set-up there is: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test quick lint types docs lowest lock clean

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

lint: $(READY) types  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## mypy, as strict as pyproject.toml says; half a minute the first time, then seconds
	$(BIN)/python -m mypy

docs: $(READY)  ## pages of every public name: build/docs/index.html
	$(BIN)/python -W error -m pdoc --docformat google glu_probe -o build/docs

$(READY): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $(READY)

# TORCH=2.13.0+cpu takes that version instead of the lowest, which for Linux is there with CUDA only; pip fetches it,
# from wherever pip is set up to look. What compares families with transformers' own modules needs the newest version
# of it, and is left out.
lowest:  ## the quick tests on the lowest versions of what pyproject.toml names, in build/lowest
	rm -rf build/lowest && mkdir -p build && $(PYTHON) -m venv build/lowest && mkdir build/lowest/wheels
	build/lowest/bin/python -m pip install -q "uv>=0.6"
	$(if $(TORCH),build/lowest/bin/python -m pip download -q --no-deps torch==$(TORCH) -d build/lowest/wheels)
	echo "$(addprefix torch==,$(TORCH))" > build/lowest/overrides.txt
	build/lowest/bin/uv pip compile -q --resolution lowest-direct --override build/lowest/overrides.txt \
		--find-links build/lowest/wheels --python build/lowest/bin/python --group test pyproject.toml \
		-o build/lowest/requirements.txt
	build/lowest/bin/uv pip install -q --python build/lowest/bin/python --find-links build/lowest/wheels \
		-r build/lowest/requirements.txt "setuptools>=77"
	build/lowest/bin/uv pip install -q --python build/lowest/bin/python --no-deps --no-build-isolation -e .
	$(ONE_THREAD) build/lowest/bin/python -m pytest -n auto -q -m "not slow" \
		--ignore=tests/checkpoint/test_families.py --ignore=tests/checkpoint/test_instances.py

lock:  ## resolve the newest versions anew and pin them, with the CPU build of torch
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install -q "pip>=25.1" setuptools
	.venv-lock/bin/python -m pip install -q torch==2.13.0
	.venv-lock/bin/python -m pip install -q --no-build-isolation -e . --group test --group docs --group types
	.venv-lock/bin/python -m pip freeze --all --exclude-editable | grep -viE '^pip==' | sed 's/+cpu//' | LC_ALL=C sort -f \
		> requirements.lock
	rm -r .venv-lock

clean:
	rm -rf $(VENV) build dist *.egg-info demo-report
