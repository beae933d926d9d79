"""States of an agent, as its files have them."""

from gpuvirt.agent.store.agentstate import KeptDesired
from gpuvirt.facts.ids import BootId, DeviceId, IommuGroup, NodeName, PciAddress, ResourceName, VgpuId, VgpuType
from gpuvirt.model.allocation.ledger import Consumer, Entry, Ledger
from gpuvirt.model.desired.observed import ConfigText, NodeRequest, Observed
from gpuvirt.model.devices.candidates import Target
from gpuvirt_sim.clock import BEGINNING

A10 = "nvidia.com/GA102GL_A10"
FIRST = "0000:65:00.0"

LEDGER = Ledger(
    entries=(
        Entry(
            ResourceName(A10),
            DeviceId(FIRST),
            Target(PciAddress(FIRST)),
            IommuGroup(12),
            "allocate:1",
            BEGINNING,
            Consumer(namespace="default", pod="vm-a", container="compute"),
        ),
        Entry(
            ResourceName("nvidia.com/GRID_T4-8Q"),
            DeviceId("aaaaaaaa-0000-4000-8000-000000000001"),
            Target(PciAddress("0000:3b:00.0"), VgpuId("aaaaaaaa-0000-4000-8000-000000000001"), VgpuType("GRID T4-8Q")),
            None,
            "allocate:2",
            BEGINNING,
        ),
    ),
    first_names={"10de:2236": "GA102GL_A10"},
    boot_id=BootId("b-1"),
    tenancies_of=BootId("b-1"),
)

CONFIGS = ConfigText("version: v1\n", "ConfigMap gpuvirt/configs, key config.yaml")
REQUEST = NodeRequest(Observed("A10-4Q"), Observed(CONFIGS))
KEPT = KeptDesired(NodeName("node01"), REQUEST, CONFIGS)
