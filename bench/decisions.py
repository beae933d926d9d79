"""Measures one turn of the agent's decisions for a node with very many GPUs and vGPUs: `python -m bench.decisions`."""

import argparse
import statistics
import time
from collections.abc import Iterator

from gpuvirt.facts.ids import IommuGroup, VgpuType
from gpuvirt.hardware.scan import scan, with_users
from gpuvirt.model.allocation.ledger import Consumer, Entry, KubeletAccount, Ledger
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import NodeRequest
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory import pciids
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.node.picture import NodeTerms
from gpuvirt.node.known.state import NodeState
from gpuvirt.sim.builder import build_host
from gpuvirt.sim.clock import BEGINNING
from gpuvirt.sim.hostspec import HostSpec, SlotSpec

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


def turns(state: NodeState, rounds: int) -> Iterator[float]:
    """Yield the processor time of each turn."""
    for number in range(rounds):
        began_s = time.process_time()
        state.refresh(float(number), BEGINNING)
        yield time.process_time() - began_s


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m bench.decisions", description=__doc__)
    parser.add_argument("--gpus", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9, help="the median counts")
    arguments = parser.parse_args()
    state = state_of(arguments.gpus)
    first_s, *later_s = turns(state, arguments.rounds)
    median_ms, best_ms = statistics.median(later_s) * 1e3, min(later_s) * 1e3
    allocate_all(state)
    allocated_s = tuple(turns(state, arguments.rounds))
    print(f"{arguments.gpus} GPUs, {arguments.gpus * EACH} vGPUs, processor time of one turn of decisions:")
    print(f"first {first_s * 1e3:.0f} ms, then median {median_ms:.0f} ms, best {best_ms:.0f} ms")
    median_ms, best_ms = statistics.median(allocated_s) * 1e3, min(allocated_s) * 1e3
    print(f"all vGPUs allocated: median {median_ms:.0f} ms, best {best_ms:.0f} ms")


if __name__ == "__main__":
    main()
