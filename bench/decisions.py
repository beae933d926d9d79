"""Measures one turn of the agent's decisions for a node with very many GPUs and vGPUs: `python -m bench.decisions`."""

import argparse
import dataclasses
import pickle
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from gpuvirt.agent.known.state import NodeState
from gpuvirt.facts.ids import IommuGroup, VgpuType
from gpuvirt.facts.snapshot import Facts
from gpuvirt.hardware.scan import scan, with_users
from gpuvirt.model.allocation.ledger import Consumer, Entry, KubeletAccount, Ledger
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import NodeRequest
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory import pciids
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.node.parts import Parts
from gpuvirt.model.node.picture import NodeTerms
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.clock import BEGINNING
from gpuvirt_sim.hostspec import HostSpec, SlotSpec

EACH = 4
"""The vGPUs of each GPU."""


def state_of(gpus: int) -> NodeState:
    """Return the state of an agent that has observed a node with so many T4, each with its four desired vGPUs."""
    slots = tuple(
        SlotSpec(
            at=f"{number // 16:04x}:{0x10 + number % 16:02x}:00.0",
            board="T4",
            group=IommuGroup(number),
            numa=0,
            vgpus={VgpuType("GRID T4-4Q"): EACH},
        )
        for number in range(gpus)
    )
    kernel = build_host(HostSpec(about="very many GPUs", slots=slots))
    settings = Settings(mode=DesiredMode.VGPU, vgpu_config="T4-4Q")
    state = NodeState(NodeTerms(settings, PciIds((pciids.shipped(),))), Ledger())
    state.observe_facts(with_users(kernel, scan(kernel)))
    state.observe_account(KubeletAccount(BEGINNING, 0.0, {}))
    state.observe_request(NodeRequest())
    return state


def allocate_all(state: NodeState) -> None:
    """Allocate each offered vGPU to a pod of its own."""
    entries = tuple(
        Entry(
            resource,
            device.id,
            device.candidate.target,
            device.candidate.group,
            f"allocation-{device.id}",
            BEGINNING,
            Consumer(namespace="default", pod=device.id),
            allocated_s=0.0,
        )
        for resource, device in state.memory.offers.devices()
    )
    state.record_allocation(entries)


def turns(state: NodeState, rounds: int, change: Callable[[int], object] = lambda _: None) -> Iterator[float]:
    """Yield the processor time of each turn, each after a change of what was observed."""
    for number in range(rounds):
        change(number)
        began_s = time.process_time()
        state.decide(float(number), BEGINNING)
        yield time.process_time() - began_s


def without_parts(state: NodeState) -> None:
    """Let the next turn decide everything from scratch."""
    state.memory = dataclasses.replace(state.memory, parts=Parts())


def allocate_again(state: NodeState, number: int) -> None:
    """Give a vGPU that a pod has to another pod."""
    entry, *others = state.ledger.entries
    pod = Consumer(namespace="default", pod=f"later-{number}")
    state.record_allocation((*others, replace(entry, allocation=f"later-{number}", consumer=pod)))


def facts_again(state: NodeState) -> Facts:
    """Return the facts as another scan of the same host finds them: all objects are new."""
    if state.inventory is None:
        raise ValueError("the host was not observed yet")
    facts: Facts = pickle.loads(pickle.dumps(state.inventory.facts))  # noqa: S301  the bytes are our own
    return facts


def facts_with_change(state: NodeState, number: int) -> Facts:
    """Return the facts of an observation in which one GPU has changed."""
    facts = facts_again(state)
    gpu = sorted(facts.vgpu_hosts)[number]
    function = replace(facts.functions[gpu], numa_node=number + 1)
    return replace(facts, functions={**facts.functions, gpu: function})


def report(what: str, times_s: Iterable[float]) -> None:
    """Print the median and the best of times."""
    found = tuple(times_s)
    print(f"{what}: median {statistics.median(found) * 1e3:.0f} ms, best {min(found) * 1e3:.0f} ms")


def observations(state: NodeState, rounds: int) -> Iterator[float]:
    """Yield the processor time of taking an observation of the host and an account that have nothing new."""
    devices = {(entry.resource, entry.device): entry.consumer for entry in state.ledger.entries if entry.consumer}
    for _ in range(rounds):
        facts = facts_again(state)
        account = KubeletAccount(BEGINNING, 0.0, dict(devices))
        began_s = time.process_time()
        state.observe_facts(facts)
        state.observe_account(account)
        yield time.process_time() - began_s


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m bench.decisions", description=__doc__)
    parser.add_argument("--gpus", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9, help="the median counts")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    state = state_of(arguments.gpus)
    print(f"{arguments.gpus} GPUs, {arguments.gpus * EACH} vGPUs, processor time of one turn of decisions:")
    first_s, *_ = turns(state, 3)
    print(f"first {first_s * 1e3:.0f} ms")
    report("nothing has changed", turns(state, rounds))
    report("from scratch", turns(state, rounds, lambda _: without_parts(state)))
    allocate_all(state)
    print("all vGPUs allocated:")
    report("nothing has changed", list(turns(state, rounds + 2))[2:])
    report("from scratch", turns(state, rounds, lambda _: without_parts(state)))
    report("a pod gets a vGPU", turns(state, rounds, lambda number: allocate_again(state, number)))
    report(
        "one GPU has changed",
        turns(state, rounds, lambda number: state.observe_facts(facts_with_change(state, number))),
    )
    report("an observation and an account without news", list(observations(state, rounds + 2))[2:])


if __name__ == "__main__":
    main()
