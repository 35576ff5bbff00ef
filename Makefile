# One command for each thing a person wants of this repository; `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
DEMO := $(BIN)/evenstep train --model lenet --data digits --batch-size 64 --momentum 0.9 --epochs 15 \
	$$(test -e src/evenstep/arithmetic/lib/plain.so && echo --arithmetic portable)

GAINS := lenet.evenstep.1.v8,lenet.evenstep.2.v8,lenet.plain.1.channels_last,lenet.plain.1.channels_last.keeps,resnet18.evenstep.2.v8
SYNC := resnet18.evenstep.2.v8.n128,resnet18.evenstep.2.v8.n128.sync
BENCHMARKS := step_overhead self_check first_step memory embeddings step_profile uneven_devices processes latency cable engine_experiments hybridize stages owners kinds recording portable kills interrupts checkpoints flips soak crowds

# A worker that dies ends the tests, with the name of its test.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup --max-worker-restart=0

# As a processor without AVX-512 computes.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2

RELEASED := pyproject.toml CITATION.cff SECURITY.md CODE_OF_CONDUCT.md CONTRIBUTING.md README.md

# `make gpu` installs nothing: it takes the environment of `make install`, or else python3.
DEVICE ?= cuda
KIT := $(abspath $(firstword $(wildcard $(BIN)/python) $(shell command -v python3)))
KIT_RESULT := $(abspath $(if $(filter emu,$(DEVICE)),build/gpu.json,benchmarks/results/gpu.json))

QUICK := @tests/quick.txt

# What a new user does, and does wrong; `make dist` runs it against the wheel.
FIRST_HOUR := $(addprefix tests/, test_readme.py training/test_mistakes.py training/test_silent_habits.py \
	training/test_what_is_shown.py callbacks/test_progress_bar.py callbacks/test_curve.py)

.PHONY: help install demo quick test accelerator gpu slow exhaustive mutants versions lint types format check bench book notebooks arm docs-site dist placeholders clean

help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/'

install: $(VENV)/installed ## a virtual environment in .venv with evenstep and what its tests need

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/demo:
	@test -e $(VENV)/installed || echo "Installing torch and evenstep in $(VENV), about a gigabyte:"
	@test -e $(VENV)/installed || { $(PYTHON) -m venv $(VENV) && \
		$(BIN)/pip install --disable-pip-version-check -c constraints.txt torch && \
		$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e . ; }
	@touch $@

demo: $(VENV)/demo ## train LeNet on handwritten digits on 1 and on 2 devices: the same weights
	@echo "Training LeNet twice, on 1 and on 2 devices; 20 seconds on two cores:"
	@$(DEMO) --devices 1 --json $(VENV)/demo-1.json
	@$(DEMO) --devices 2 --json $(VENV)/demo-2.json
	@$(BIN)/python examples/compare_runs.py $(VENV)/demo-1.json $(VENV)/demo-2.json

quick: install ## the fast part of the tests (under a minute on two cores)
	$(PYTEST) -m 'not slow' $(QUICK)

test: install ## the tests (12 to 25 minutes on two cores)
	$(PYTEST) -m 'not slow'
	$(PYTEST) --accelerator -m 'not slow' tests/accelerator

accelerator: install ## all tests on the emulated accelerator (needs g++)
	$(PYTEST) --accelerator tests/accelerator

gpu: ## what a GPU shows of evenstep, in nine minutes, as JSON (DEVICE=emu: the emulated one, small)
	cd benchmarks && PYTHONPATH=../src:../tests/support:$$PYTHONPATH $(KIT) -m gpu --device $(DEVICE) \
		$(if $(filter emu,$(DEVICE)),--quick) --out $(KIT_RESULT)

slow: install ## the long tests, and some as a processor without AVX-512 computes them
	$(PYTEST) -m 'slow and not exhaustive'
	$(AVX2) $(PYTEST) -m 'not slow' $(QUICK) tests/golden tests/zoo
	$(PYTEST) --accelerator -m 'slow and not exhaustive' tests/accelerator

exhaustive: install ## the tests that take minutes each
	$(PYTEST) -m exhaustive
	$(PYTEST) --accelerator -m exhaustive tests/accelerator

mutants: install ## plant faults in the library, and see that its tests catch each (twenty minutes)
	$(BIN)/python tests/mutants/run.py

lint: install ## format and lint, as CI wants them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 src examples  # text without an encoding
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet .github/workflows

types: install
	$(BIN)/mypy

check: lint types test ## everything that a change must pass

format: install ## put the code into its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install ## measure again and write docs/benchmarks.md (hours; needs a quiet machine)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/measure.py training_speed
	$(BIN)/python benchmarks/measure.py training_speed --only $(GAINS) --out benchmarks/results/gains.json
	$(BIN)/python benchmarks/measure.py training_speed --only $(SYNC) --out benchmarks/results/batch_norm.json
	$(BIN)/python benchmarks/measure.py text_speed --only chargpt-small,bert
	$(BIN)/python benchmarks/measure.py text_speed --only chargpt. --rounds 1 --out benchmarks/results/chargpt.json
	$(BIN)/evenstep bench scaling --model lenet --devices 1,2 --json benchmarks/results/scaling_lenet.json
	$(BIN)/evenstep bench scaling --model resnet18 --batch-size 64 --devices 1,2 --json benchmarks/results/scaling_resnet18.json
	set -e; for name in $(BENCHMARKS); do $(BIN)/python benchmarks/measure.py $$name; done
	$(BIN)/python benchmarks/write_docs.py

versions: install ## test each version of torch and Python that is supported, in environments of their own (hours)
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	$(BIN)/python tests/versions/try_all.py --quick "$(QUICK)"
	$(BIN)/python benchmarks/write_docs.py

arm: ## Python and torch for ARM in build/arm, for a test that ARM has the same bits (Debian, root)
	tests/support/arm.sh build/arm

book: install ## run the book's experiments again and write docs/book.md (hours; can be interrupted)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/evenstep reproduce --out runs/book
	cp runs/book/figures.json benchmarks/results/book.json
	$(BIN)/python benchmarks/write_docs.py

notebooks: install ## run the notebooks again and store them with their outputs (ten minutes)
	$(BIN)/python notebooks/execute.py

docs-site: install ## the documentation as a site in build/site (warnings are errors)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: install ## build wheel and sdist, check them, and try the wheel alone with each Python that is here
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dist]'
	$(BIN)/python tests/support/dist.py dist build/dist $(FIRST_HOUR)

placeholders: ## the lines that must be filled in before a release; fails while there are any
	@! grep -n 'placeholder\.invalid' $(RELEASED)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
