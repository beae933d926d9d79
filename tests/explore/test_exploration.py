"""All schedules with few departures from the default: none violates an invariant, and all end."""

from pathlib import Path
from random import Random

import pytest

from gpuvirt.agent.change.steps.changes import Change
from gpuvirt.facts.snapshot import DeviceIds
from tests.explore.__main__ import describe, own_folder
from tests.explore.claimscenarios import CLAIM_GUARDS
from tests.explore.explorer import Explorer, Tally, sample_random
from tests.explore.guard import Guard
from tests.explore.known import KNOWN, Known, is_known
from tests.explore.mutations import GUARDS
from tests.explore.observer import ViolationError
from tests.explore.ondemandguards import ON_DEMAND_GUARDS
from tests.explore.rebootscenarios import REBOOT_GUARDS
from tests.explore.removal import BrokenMutationError, after, find_missing
from tests.explore.scenarios import SCENARIOS
from tests.explore.seeds import parse
from tests.explore.shrink import kind_of, shrink
from tests.thoroughness import examples

MOST_SCHEDULES = 100
SLOWLY_NOTICED = frozenset(
    {
        "account: a pod that has not got its folder",
        "gate: no creation where a change may touch the GPU",
        "on demand: a container starts only with the recorded vGPU",
        "on demand: both accounts are known",
    }
)
"""Guards of which each takes half a minute: `make explore-mutations` removes them."""
QUICKLY_NOTICED = (
    "gate: no step of a plan that took too long",
    "planning: pods",
    "planning: pods whose device is not found here",
    "allocation check: devices are read again",
    "allocation check: who uses the device",
    "allocation: a group is not given to two pods",
    "allocation: a device is not given under a second id",
    "gate: new allocations without a device before each step",
    "account: pods of the checkpoint",
    "account: a checkpoint that was lost",
    "account: what the kubelet counts is unread",
    "allocation: a device that the kubelet has forgotten",
    "ledger: pods that another agent has served",
    "ledger: an allocation counts before the kubelet lists it",
    "ledger: no allocation ends before its admission is settled",
    "gate on disk: no allocation ends before its admission is settled",
    "executor: the driver after a step is the expected one",
    "drivers: what failed is put back",
    "shares: all accounts but the API server's",
    "drivers: a GPU without a driver is not as desired",
    "gate: the newest account before each step",
    "planning: pods of vGPUs",
    "vGPUs: what pods have",
    "vGPUs: VFs are switched on below nobody",
    "gates: those of an unprivileged plugin",
    "gates: what a plugin without gates lists",
    "gates: a file that fails refuses",
    "tenants: no GPU with the memory of another tenant",
    *(name for name in ON_DEMAND_GUARDS if name not in SLOWLY_NOTICED),
    *REBOOT_GUARDS,
    *CLAIM_GUARDS,
)

MOST_SCHEDULES_OF_KNOWN = 400
MENDED = {
    "pod-of-another-plugin:-1.0": "gate: the newest account before each step",
    "a-step-fails-on-the-way-back:0.2": "drivers: a GPU without a driver is not as desired",
    "killed-during-a-change:19.1": "drivers: the record of a change before it is made",
    "container-is-taken:19.2": "executor: NVIDIA's unbindLock",
    "amdgpu-is-taken:19.2": "executor: the walk right before an unbind",
    "on-demand-create-is-blocked:72.2": "on demand: no creation where the driver lists no room",
    "on-demand-removal-ends:17.1,62.2": "on demand: a vGPU that is created as a change of its GPU ends",
    "on-demand-power-loss-after-a-start:87.1": "on demand: a container starts only with its vGPU's own nodes",
    "on-demand-removed-by-hand:22.2": "on demand: a vGPU is read again before a container starts",
    "memory-of-a-vm-after-a-kill:0.2,34.1": "tenants: recorded before the answer of Allocate",
    "command-after-the-agent:6.1,7.1": "gate on disk: allocations that no account shows yet",
}
"""Schedules of fixed findings, each with the guard that fixes it."""

UNGUARDED = (
    "container-is-taken:23.1:-1.1",
    "command-or-admission:3.1,15.2",
    "on-demand-power-loss-after-a-start:65.1",
)
"""Fixed findings without a single guard: a change that outlasted its worker's timeout kept its GPU from being offered;
an allocation waited for a command's change, and allocated a device by the state before that change; after the first
scan was blocked, the search for processes made a host that was not read one without devices."""

RANDOM_SCHEDULES = 100
SCHEDULES = 24
"""The schedules of each scenario: a count and not a time, so that each computer runs the same schedules."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_schedule_violates_an_invariant(name: str) -> None:
    with own_folder() as folder:
        explorer = Explorer(name, SCENARIOS[name], folder, spread=Random(0))
        left = examples(SCHEDULES)
        for found in explorer.explore(2, lambda: explorer.tally.schedules >= left):
            if not is_known(name, kind_of(found.failure)):
                small = shrink(explorer, found)
                pytest.fail(f"{describe(small.failure)}\nagain: make explore SEED='{small.seed}'")
        assert explorer.tally.schedules == left or explorer.tally.complete == 2


@pytest.mark.timeout(600)
def test_no_random_scenario_violates_an_invariant(tmp_path: Path) -> None:
    tally, count = Tally(), examples(RANDOM_SCHEDULES)
    for found in sample_random(range(1_000, 1_000 + count), tmp_path, tally, lambda: False):
        small = shrink(Explorer.of(found.seed.name, tmp_path), found)
        pytest.fail(f"{describe(small.failure)}\nagain: make explore SEED='{small.seed}'")
    assert tally.schedules == count


@pytest.mark.timeout(600)
@pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN.keys())
def test_a_known_finding_is_still_reproduced(known: Known, tmp_path: Path) -> None:
    explorer = Explorer(known.scenario, SCENARIOS[known.scenario], tmp_path)
    failure = explorer.try_seed(parse(known.seed)).failure
    if failure is not None and kind_of(failure) == known.kind:
        return
    search = explorer.explore(1, lambda: explorer.tally.schedules >= MOST_SCHEDULES_OF_KNOWN)
    moved = next((found.seed for found in search if kind_of(found.failure) == known.kind), None)
    found = f"its seed is {moved} by now" if moved is not None else "it is mended: take it from the list"
    assert moved is not None, f"explore/known.py: {known.scenario}, {known.kind}: {found}"


@pytest.mark.parametrize("text", MENDED)
def test_a_fixed_schedule_fails_without_the_guard_that_fixes_it(text: str, tmp_path: Path) -> None:
    """A seed is valid only while the points of the code are the same: this schedule must still reach the old fault."""
    seed = parse(text)
    with GUARDS[MENDED[text]].removed():
        outcome = Explorer.of(seed.name, tmp_path).try_seed(seed)
    assert isinstance(outcome.failure, ViolationError), (
        f"take another schedule: make explore-mutations ARGS='{MENDED[text]}'"
    )


@pytest.mark.parametrize("text", [*MENDED, *UNGUARDED])
def test_a_fixed_schedule_violates_no_invariant(text: str, tmp_path: Path) -> None:
    seed = parse(text)
    outcome = Explorer.of(seed.name, tmp_path).try_seed(seed)
    assert outcome.failure is None


@pytest.mark.parametrize("name", QUICKLY_NOTICED)
def test_the_removal_of_a_guard_violates_an_invariant(name: str, tmp_path: Path) -> None:
    """The guards that a few schedules cover; `make explore-mutations` removes all guards."""
    with GUARDS[name].removed():
        found, _ = find_missing(GUARDS[name], tmp_path, after(MOST_SCHEDULES))
    assert found is not None


def test_a_crash_without_a_guard_is_a_broken_mutation(tmp_path: Path) -> None:
    takes_nothing = Guard(Change, "_ask_account", lambda: None, ("pod-of-another-plugin",))
    with takes_nothing.removed(), pytest.raises(BrokenMutationError, match="TypeError"):
        find_missing(takes_nothing, tmp_path, after(2))


@pytest.mark.parametrize("name", ["used-gpu-is-unplugged-unseen", "shared-gpu-is-unplugged-unseen"])
def test_an_agent_that_ends_itself_is_a_finding(name: str, tmp_path: Path) -> None:
    """Once a scan took the ids of all GPUs from the scan before, and then the agent ended with the first account that
    named a GPU that had left (tests/agent/node/test_vanishing_devices.py)."""
    explorer = Explorer.of(name, tmp_path)
    with Guard(DeviceIds, "of", lambda ids, _: ids, (name,)).removed():
        found = next(explorer.explore(1, lambda: explorer.tally.schedules >= MOST_SCHEDULES), None)
    assert found is not None
    assert kind_of(found.failure) == "KeyError"


@pytest.mark.timeout(60)
def test_a_random_seed_plays_the_random_schedule(tmp_path: Path) -> None:
    """In this schedule the agent is killed before it runs; the explorer once deadlocked on that."""
    explorer = Explorer.of("random-5129", tmp_path)
    drawn, plain = (explorer.try_seed(parse(text), traced=True) for text in ("random-5129", "random-5129:0.0"))
    assert drawn.failure is None
    assert [line[0] for line in drawn.story].count("*") > 1
    assert "*" not in [line[0] for line in plain.story]
    assert [str(parse(text)) for text in ("random-5129", "random-5129:0.0")] == ["random-5129", "random-5129:0.0"]


def test_a_seed_plays_the_same_schedule_each_time(tmp_path: Path) -> None:
    explorer = Explorer("killed", SCENARIOS["killed"], tmp_path)
    seed = parse("killed:12.1,30.2:-2.0")
    assert str(seed) == "killed:12.1,30.2:-2.0"
    stories = [explorer.try_seed(seed, traced=True).story for _ in range(3)]
    assert "--- at rest" in stories[0]
    assert stories[0] == stories[1] == stories[2]
