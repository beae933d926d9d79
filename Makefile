# What there is to do here; `make` alone lists it.
# Everything is set up on the way: Python 3.11 or later with its venv module is all that must be there.

HOST ?= 2xA10
FLAVOUR ?= groups
SECONDS ?= 600
SEED ?=
JOBS ?= 1
REGISTRY ?=
VENV := .venv/bin
PINS := pyproject.toml schedules/pyproject.toml simulator/pyproject.toml uv.lock constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo demo-schedule test test-rings test-all test-full-size soak explore explore-mutations removals test-cluster test-kernel lab-prepare lab-cluster demo-cluster lab-shell lab-down lab-kernel-shell lint format
.PHONY: bench bench-extender bench-webhook generate digests picture pci-ids image bundle release lock clean

help:  ## List what there is to do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/made-for-run  ## Show what gpuvirt does, on a simulated host (HOST=8xH100 for another)
	@$(VENV)/gpuvirt demo --host $(HOST)

demo-schedule: .venv/made-for-run  ## Play a day of a VgpuSchedule in virtual time: five workers, their pods and units
	@$(VENV)/gpuvirt demo --schedule

test: .venv/made-for-dev  ## Run the tests that need Python alone, with a third of the random examples
	GPUVIRT_QUICK_TESTS=1 $(VENV)/pytest -n auto -m "not ring" $(ARGS)

test-rings: .venv/made-for-dev  ## Run all others that can run here; as root, a kubelet, containers and a guest
	@$(VENV)/python -m tests.rings
	$(VENV)/pytest -n auto --dist loadgroup -m ring $(ARGS)

test-all: .venv/made-for-dev  ## Run both at once, with all random examples
	$(VENV)/pytest -n auto --dist loadgroup $(ARGS)

test-full-size: .venv/made-for-dev  ## Run the tests of many pods and many switches at their full size, which CI runs with fewer
	GPUVIRT_FULL_SIZE_TESTS=1 $(VENV)/pytest tests/agent/ondemand/test_on_kubelet.py tests/agent/ondemand/test_killed_agents.py tests/cluster/test_on_demand_on_node.py tests/schedules/test_killed_controllers.py $(ARGS)

soak: .venv/made-for-dev  ## Run random tests with new seeds, and print the lines that repeat failures (SECONDS=600; JOBS=2)
	@$(VENV)/python -m tests.soak --seconds $(SECONDS) --jobs $(JOBS) $(ARGS)

test-cluster: .venv/made-for-dev  ## Run the tests on a real Kubernetes node and on a control plane, which they start and stop
	$(VENV)/pytest -n 3 --dist loadgroup tests/cluster tests/controlplane

lab-prepare: .venv/made-for-dev  ## Fetch and build all that the labs need, once: a vCenter, Kubernetes, helm, a base image, Kata's witness, kernels
	@$(VENV)/python -m lab.vsphere
	@$(VENV)/python -m lab.cluster build
	@$(VENV)/python -m lab.dra
	@$(VENV)/python -m lab.cluster base
	@$(VENV)/python -m lab.kata
	@$(VENV)/python -m lab.kernel prepare groups
	@$(VENV)/python -m lab.kernel prepare both

lab-cluster: .venv/made-for-dev  ## Start a real Kubernetes node on this host, as root (lab/cluster/README.md)
	@$(VENV)/python -m lab.cluster up

demo-cluster: .venv/made-for-dev  ## Start such a node as root, with gpuvirt on a simulated host, and say what to type there
	@$(VENV)/python -m lab.cluster demo

lab-shell: .venv/made-for-dev  ## Open a shell with kubectl for it
	@$(VENV)/python -m lab.cluster shell

lab-down: .venv/made-for-dev  ## Stop it, and take away what it has left
	@$(VENV)/python -m lab.cluster down

explore: .venv/made-for-dev  ## Explore schedules of the agent for harm (SECONDS=600; JOBS=2; SEED=... runs one again)
	@$(VENV)/python -m tests.explore $(if $(SEED),--seed '$(SEED)',--seconds $(SECONDS) --jobs $(JOBS)) $(ARGS)

explore-mutations: .venv/made-for-dev  ## Remove guards that cover for each other, and see that exploration notices
	@$(VENV)/python -m tests.explore.removal $(ARGS)

removals: .venv/made-for-dev  ## Remove every guard in turn, and see that a test notices (JOBS=2; ARGS='node.change' for some)
	@$(VENV)/python -m tests.removals --jobs $(JOBS) $(ARGS)

test-kernel: .venv/made-for-dev  ## Run the tests against a real kernel in a guest; needs root (lab/kernel)
	$(VENV)/pytest -m ring -k guest

lab-kernel-shell: .venv/made-for-dev  ## Boot that guest and have a shell in it (FLAVOUR=cdevs for another kernel)
	$(VENV)/python -m lab.kernel shell $(FLAVOUR)

lint: .venv/made-for-dev  ## Check style, types, layers, and that generated files are up to date
	$(VENV)/ruff check
	$(VENV)/ruff format --check
	$(VENV)/mypy
	$(VENV)/lint-imports --no-logo
	$(VENV)/python tools/check_words.py
	$(VENV)/python tools/check_proofs.py
	$(VENV)/python tools/check_clock.py
	$(VENV)/python tools/check_importers.py
	$(VENV)/python tools/check_budget.py
	$(VENV)/python tools/check_types.py
	$(VENV)/python tools/make_protos.py --check
	$(VENV)/python tools/make_crds.py --check
	$(VENV)/python tools/make_chart.py --check
	$(VENV)/python tools/make_json_reference.py --check
	$(VENV)/python tools/make_reference.py --check
	$(VENV)/python tools/make_picture.py --check

format: .venv/made-for-dev  ## Format the code
	$(VENV)/ruff check --fix
	$(VENV)/ruff format

bench: .venv/made-for-dev  ## Measure speed and memory (ARGS='--peer CMD' for another plugin beside it)
	@$(VENV)/python -m bench $(ARGS)

bench-extender: .venv/made-for-dev  ## Measure the scheduler extender (ARGS='--peer-kind KIND --peer-command CMD' for another one beside it)
	@$(VENV)/python -m bench.extender $(ARGS)

bench-webhook: .venv/made-for-dev  ## Measure the admission webhook over TLS
	@$(VENV)/python -m bench.webhook

generate: .venv/made-for-dev  ## Generate messages of the kubelet's gRPC, manifests of our kinds, what the chart shares, and reference tables
	$(VENV)/python tools/make_protos.py
	$(VENV)/python tools/make_crds.py
	$(VENV)/python tools/make_chart.py
	$(VENV)/python tools/make_reference.py
	$(VENV)/python tools/make_json_reference.py

digests: .venv/made-for-dev  ## Record the digests of the objects that policies render, where they are meant to change
	$(VENV)/python -m tests.controller.operands

picture: .venv/made-for-dev  ## Draw the pictures again, from docs/flow.dot and the demo; needs Graphviz
	$(VENV)/python tools/make_picture.py
	$(VENV)/python tools/make_terminal.py

pci-ids:  ## Regenerate the PCI ID data from its pinned source
	python3 tools/make_pci_ids.py

image:  ## Build the image with buildah, podman or docker, and push it (REGISTRY=registry.example.com/team) or write it to dist/
	@REGISTRY='$(REGISTRY)' tools/make-image $(ARGS)

bundle: .venv/made-for-run  ## Write wheels, chart and image into one tar in dist/, for a cluster without internet access
	@$(VENV)/python tools/make_release.py bundle $(ARGS)

release: .venv/made-for-run  ## Fill dist/: wheels, sdists, chart package, image, SBOM, checksums
	@$(VENV)/python tools/make_release.py release $(ARGS)

lock:  ## Pin the newest versions of what we depend on; needs uv
	uv lock --upgrade
	uv export --quiet --frozen --all-packages --extra dev --extra libvirt --extra vsphere --no-emit-workspace --no-hashes --no-annotate --no-header -o constraints.txt

clean:  ## Take away what was set up and cached
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/made-for-run: $(PINS)
	@tools/make-venv run
	@touch $@

.venv/made-for-dev: $(PINS)
	@tools/make-venv dev
	@touch $@ .venv/made-for-run
