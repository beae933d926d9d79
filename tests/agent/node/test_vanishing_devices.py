"""Devices that leave the host, and files that can't be read, in any order: what is known stays consistent.

Other plugins' accounts name devices by ids that a scan has read before. The agent ends if a decision asks for a device
that the inventory lacks.
"""

import errno

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace

from gpuvirt.agent.known.state import NodeState
from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName, VgpuType
from gpuvirt.facts.snapshot import Facts
from gpuvirt.hardware.scan import scan, scan_some, with_device_ids, with_users
from gpuvirt.model.allocation.ledger import Consumer, KubeletAccount, Ledger
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.clock import BEGINNING
from gpuvirt_sim.devices.nvidia import gpu_uuid
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from tests.agent.node.pictures import TERMS
from tests.thoroughness import examples

T4, A10, L40S, ON_VFIO, FLEX = (PciAddress(f"0000:{bus}:00.0") for bus in ("3b", "65", "98", "b1", "c1"))
HOST = HostSpec(
    about="GPUs for containers and VMs, with mediated vGPUs, with vGPUs on VFs, and with bare VFs",
    slots=(
        SlotSpec(at=T4, board="T4", group=31, numa=0, vgpus={VgpuType("GRID T4-8Q"): 2}),
        SlotSpec(at=A10, board="A10", group=32, numa=0, driver="nvidia"),
        SlotSpec(at=L40S, board="L40S", group=33, numa=1, vfs=3),
        SlotSpec(at=ON_VFIO, board="A10", group=34, numa=1, driver="vfio-pci"),
        SlotSpec(at=FLEX, board="Flex170", group=35, numa=1, vfs=3),
    ),
)
GPUS = (T4, A10, L40S, ON_VFIO, FLEX)
LISTS = tuple(map(HostPath, ("/sys/bus/pci/devices", "/sys/bus/mdev/devices", "/sys/class/mdev_bus", "/dev/vfio")))
ATTRIBUTES = ("vendor", "driver", "iommu_group", "physfn", "sriov_numvfs", "nvidia/current_vgpu_type", "drm", "config")


class VanishingDevices(RuleBasedStateMachine):
    """The state of an agent whose host loses devices, seen by scans of each kind, beside the kubelet's accounts."""

    @initialize(mode=st.sampled_from(list(DesiredMode)), needs_reset=st.booleans())
    def begin(self, mode: DesiredMode, needs_reset: bool) -> None:
        self.kernel = build_host(HOST)
        self.state = NodeState(replace(TERMS, settings=Settings(require_reset=needs_reset)), Ledger())
        self.now_s = 0.0
        self.consumers: dict[tuple[ResourceName, DeviceId], Consumer] = {}
        self.state.observe_request(NodeRequest(spec=Observed(GpuNodeSpec(mode=str(mode)))))
        self.a_whole_scan_ends()
        self.the_kubelet_answers()

    @property
    def known(self) -> Facts:
        assert self.state.inventory is not None
        return self.state.inventory.facts

    def take(self, facts: Facts) -> None:
        assert set(facts.device_ids.gpu_uuids.values()) <= facts.functions.keys()
        assert set(facts.device_ids.drm_nodes.values()) <= facts.functions.keys()
        assert facts.device_ids.information.keys() | facts.device_ids.mig.keys() <= facts.functions.keys()
        self.now_s += 1.0
        self.state.observe_facts(facts)
        self.decide()

    def decide(self) -> None:
        self.state.decide(self.now_s, BEGINNING)

    # --- observations

    @rule()
    def a_whole_scan_ends(self) -> None:
        before = self.known if self.state.inventory is not None else None
        self.take(with_users(self.kernel, with_device_ids(self.kernel, scan(self.kernel, before))))

    @rule()
    def a_brief_scan_ends(self) -> None:
        self.take(scan(self.kernel, self.known, brief=True))

    @rule(gpu=st.sampled_from(GPUS))
    def a_change_scans_a_gpu(self, gpu: PciAddress) -> None:
        self.take(scan_some(self.kernel, {gpu}, self.known))

    @rule()
    def the_kubelet_answers(self) -> None:
        self.now_s += 1.0
        self.state.observe_account(KubeletAccount(BEGINNING, self.now_s, dict(self.consumers)))
        self.decide()

    # --- pods

    @rule(gpu=st.sampled_from(GPUS), is_by_uuid=st.booleans())
    def a_pod_has_a_gpu(self, gpu: PciAddress, is_by_uuid: bool) -> None:
        key = ("nvidia.com/gpu", gpu_uuid(gpu)) if is_by_uuid else ("nvidia.com/AD102GL_L40S", gpu)
        self.consumers[ResourceName(key[0]), DeviceId(key[1])] = Consumer(namespace="default", pod=f"pod-{gpu[5:7]}")

    @rule(data=st.data())
    def a_pod_has_a_vgpu(self, data: st.DataObject) -> None:
        if vgpus := sorted(self.state.inventory.vgpus if self.state.inventory is not None else ()):
            vgpu = data.draw(st.sampled_from(vgpus))
            self.consumers[ResourceName("nvidia.com/GRID_T4-8Q"), DeviceId(vgpu)] = Consumer(pod=f"pod-{vgpu}")

    @rule(data=st.data())
    @precondition(lambda self: self.consumers)
    def a_pod_ends(self, data: st.DataObject) -> None:
        del self.consumers[data.draw(st.sampled_from(sorted(self.consumers)))]

    # --- the host

    @rule(gpu=st.sampled_from(GPUS))
    def a_gpu_is_unplugged(self, gpu: PciAddress) -> None:
        if gpu in self.kernel.pci.functions:
            self.kernel.unplug(gpu)

    @rule(gpu=st.sampled_from(GPUS))
    def a_gpu_is_plugged_in(self, gpu: PciAddress) -> None:
        if gpu in self.kernel.pci.removed:
            self.kernel.plug_in(gpu)

    @rule(gpu=st.sampled_from((A10, ON_VFIO)), driver=st.sampled_from(("nvidia", "vfio-pci", None)))
    def a_gpu_gets_another_driver(self, gpu: PciAddress, driver: str | None) -> None:
        if gpu in self.kernel.pci.functions:
            self.kernel.rebind(gpu, driver)

    @rule(gpu=st.sampled_from(GPUS))
    def a_gpu_falls_off_the_bus(self, gpu: PciAddress) -> None:
        if gpu in self.kernel.pci.functions:
            self.kernel.fall_off_bus(gpu)

    @rule(path=st.sampled_from(LISTS), number=st.sampled_from((errno.EIO, errno.ENOENT)))
    def a_folder_cant_be_listed(self, path: HostPath, number: int) -> None:
        self.kernel.faults.fail(path, number)

    @rule(data=st.data(), attribute=st.sampled_from(ATTRIBUTES))
    def an_attribute_cant_be_read(self, data: st.DataObject, attribute: str) -> None:
        functions = sorted(self.kernel.pci.functions)
        if functions:
            address = data.draw(st.sampled_from(functions))
            self.kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{address}/{attribute}"), errno.EIO)

    @rule()
    def all_can_be_read_again(self) -> None:
        self.kernel.faults.heal()


TestVanishingDevices = VanishingDevices.TestCase
TestVanishingDevices.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
