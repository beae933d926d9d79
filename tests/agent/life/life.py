"""The life of a node as a hypothesis state machine, and its invariants.

Admins and accidents on the host, pods that start and end, a kubelet that reads lists late, an agent that is killed.
"""

import errno
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override

from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName
from gpuvirt.model.allocation.ledger import Consumer
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.files.blocking import WouldBlock
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from gpuvirt_sim.kernel import Process, SimKernel
from tests.agent.life.rigs import Rig

LEFT, RIGHT = PciAddress("0000:0b:01.0"), PciAddress("0000:0b:02.0")
RTX, A10 = PciAddress("0000:04:00.0"), PciAddress("0000:65:00.0")
AUDIO = PciAddress("0000:04:00.1")
T4 = PciAddress("0000:3b:00.0")

HOST = HostSpec(
    about="a bit of everything: two GPUs in one group, one with audio, one alone, one with mdevs",
    slots=(
        SlotSpec(at="0000:00:0c.0", board="root-port", group=12),
        SlotSpec(at="0000:0a:00.0", board="pcie-pci-bridge", group=12, behind="0000:00:0c.0"),
        SlotSpec(at=LEFT, board="T4", driver="vfio-pci", group=12, numa=0, behind="0000:0a:00.0"),
        SlotSpec(at=RIGHT, board="T4", driver="vfio-pci", group=12, numa=0, behind="0000:0a:00.0"),
        SlotSpec(at=RTX, board="RTX2060", driver="vfio-pci", group=27, numa=0),
        SlotSpec(at=A10, board="A10", driver="vfio-pci", group=30, numa=1),
        SlotSpec(at=T4, board="T4", group=31, numa=1, vgpus={"GRID T4-8Q": 2}),  # type: ignore[dict-item]
    ),
)

WHOLE = st.sampled_from([LEFT, RIGHT, RTX, A10])
FUNCTIONS = st.sampled_from([LEFT, RIGHT, RTX, A10, AUDIO])
DRIVERS = st.sampled_from(["vfio-pci", "nvidia", None])
ATTRIBUTES = st.sampled_from(["vendor", "device", "class", "driver", "iommu_group", "numa_node", "config"])
RESOURCES = st.sampled_from(
    [
        ResourceName("nvidia.com/TU104GL_TESLA_T4"),
        ResourceName("nvidia.com/GA102GL_A10"),
        ResourceName("nvidia.com/GRID_T4-8Q"),
    ]
)
MDEV_CREATE = HostPath(f"/sys/class/mdev_bus/{T4}/mdev_supported_types/nvidia-233/create")


@dataclass
class Pod:
    """A pod, and the VMs that run in it."""

    name: str
    resource: ResourceName
    devices: list[DeviceId]
    groups: set[IommuGroup]
    processes: list[Process] = field(default_factory=list)


class Life(RuleBasedStateMachine):
    """The rules and invariants; a subclass names the rig."""

    def make_rig(self, kernel: SimKernel) -> Rig:
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.kernel = build_host(HOST)
        self.rig = self.make_rig(self.kernel)
        self.pods: dict[str, Pod] = {}
        self.strangers: list[Process] = []
        self.count = 0
        self.listed: dict[ResourceName, list[DeviceId]] = {}
        self.withheld: set[ResourceName] = set()
        self.human_writes = 0
        self.human_requests = 0
        self.account_is_reported()
        self.kubelet_observes()

    @override
    def teardown(self) -> None:
        if hasattr(self, "rig"):
            try:
                self.everything_recovers()
            finally:
                self.rig.end()

    # --- the host

    @rule(data=st.data())
    def something_happens_to_the_host(self, data: st.DataObject) -> None:
        """One accident or action; a single rule, so that pods come before the host is hopeless."""
        data.draw(
            st.sampled_from(
                [
                    self.rebind,
                    self.unplug,
                    self.plug_in,
                    self.fall_off_bus,
                    self.node_goes_or_returns,
                    self.attribute_fails,
                    self.attribute_lies,
                    self.folder_fails,
                    self.make_mdev,
                    self.remove_mdev,
                    self.stranger_comes,
                    self.stranger_goes,
                ]
            )
        )(data)

    @rule()
    def all_is_mended(self) -> None:
        self.kernel.faults.heal()
        for address in list(self.kernel.pci.removed):
            self.kernel.plug_in(address)
        for address in (LEFT, RIGHT, RTX, AUDIO, A10):
            self.kernel.fall_off_bus(address, fallen=False)
            function = self.kernel.pci.functions[address]
            if function.driver != "vfio-pci" and not function.leaving:
                self.kernel.rebind(address, "vfio-pci")
        for group in (12, 27, 30):
            self.kernel.restore_node(IommuGroup(group))

    def rebind(self, data: st.DataObject) -> None:
        function = self.kernel.pci.functions.get(data.draw(FUNCTIONS))
        if function is not None and not function.leaving:
            try:
                self.kernel.rebind(function.address, data.draw(DRIVERS))
            except WouldBlock:
                self.human_requests += 1
            except OSError as error:  # a VM has the group open: no native driver can bind the GPU
                if error.errno != errno.EBUSY or not self.in_use(function.group):
                    raise

    def unplug(self, data: st.DataObject) -> None:
        address = data.draw(WHOLE)
        if address in self.kernel.pci.functions and not self.in_use(self.kernel.pci.functions[address].group):
            self.kernel.unplug(address)

    def plug_in(self, data: st.DataObject) -> None:
        address = data.draw(WHOLE)
        if address in self.kernel.pci.removed:
            self.kernel.plug_in(address)
            self.kernel.rebind(address, "vfio-pci")

    def fall_off_bus(self, data: st.DataObject) -> None:
        address = data.draw(WHOLE)
        if address in self.kernel.pci.functions:
            self.kernel.fall_off_bus(address, fallen=data.draw(st.booleans()))

    def node_goes_or_returns(self, data: st.DataObject) -> None:
        group = IommuGroup(data.draw(st.sampled_from([12, 27, 30])))
        if group in self.kernel.vfio.groups:
            (self.kernel.restore_node if data.draw(st.booleans()) else self.kernel.delete_node)(group)

    def attribute_fails(self, data: st.DataObject) -> None:
        path = HostPath(f"/sys/bus/pci/devices/{data.draw(WHOLE)}/{data.draw(ATTRIBUTES)}")
        self.kernel.faults.fail(path, data.draw(st.sampled_from([errno.EIO, errno.EACCES])))

    def attribute_lies(self, data: st.DataObject) -> None:
        path = HostPath(f"/sys/bus/pci/devices/{data.draw(WHOLE)}/{data.draw(ATTRIBUTES)}")
        self.kernel.faults.answer(path, data.draw(st.sampled_from([b"", b"0x", b"\xff\xff\xff\xff", b"0x1002\n"])))

    def folder_fails(self, data: st.DataObject) -> None:
        folders = ["/sys/bus/pci/devices", "/dev/vfio", "/sys/bus/mdev/devices"]
        self.kernel.faults.fail(HostPath(data.draw(st.sampled_from(folders))), errno.EIO)

    def stranger_comes(self, data: st.DataObject) -> None:
        """A user starts a VM by hand."""
        group = IommuGroup(data.draw(st.sampled_from([12, 27, 30])))
        if not any(group in pod.groups for pod in self.pods.values()):
            try:
                self.strangers.append(self.kernel.start_vm(group, "qemu-by-hand"))
            except (OSError, KeyError):
                return

    def stranger_goes(self, _data: st.DataObject) -> None:
        if self.strangers:
            self.kernel.end_vm(self.strangers.pop())

    def make_mdev(self, data: st.DataObject) -> None:
        self.human_writes += 1
        try:
            self.kernel.write(
                MDEV_CREATE, f"aaaaaaaa-0000-4000-8000-00000000000{data.draw(st.integers(0, 1))}".encode()
            )
        except OSError:
            return

    def remove_mdev(self, data: st.DataObject) -> None:
        devices = sorted(self.kernel.tree.folder(HostPath("/sys/bus/mdev/devices")).entries)
        if devices:
            self.human_writes += 1
            path = HostPath(f"/sys/bus/mdev/devices/{data.draw(st.sampled_from(devices))}/remove")
            try:
                self.kernel.write(path, b"1")
            except WouldBlock:
                self.human_requests += 1

    # --- the kubelet and its pods

    @rule()
    def kubelet_observes(self) -> None:
        """The kubelet gets the newest device lists; until the next call it uses these."""
        self.listed = {
            resource.name: [device.id for device in resource.devices if device.healthy]
            for resource in self.rig.view.resources
        }

    @rule(data=st.data(), counts=st.lists(st.integers(1, 2), min_size=1, max_size=4), start=st.booleans())
    def admit_some(self, data: st.DataObject, counts: list[int], start: bool) -> None:
        """Pods arrive in bursts, and the kubelet allocates from the lists that it has."""
        for count in counts:
            resources = sorted(name for name, devices in self.listed.items() if devices)
            if resources:
                self.admit(data.draw(st.sampled_from(resources)), count, start=start)

    def admit(self, resource: ResourceName, count: int, *, start: bool) -> None:
        used = {device for pod in self.pods.values() if pod.resource == resource for device in pod.devices}
        free = [device for device in self.listed[resource] if device not in used]
        if len(free) < count:
            return
        preferred = self.rig.prefer(resource, free, count)
        assert set(preferred) <= set(free)
        chosen = list(dict.fromkeys([*preferred, *free]))[:count]  # as the kubelet does if it has too few devices
        try:
            answer = self.rig.allocate(resource, chosen)
        except AllocationRefusedError as error:
            event(f"refused: {error.reason.code}")
            return
        assert resource not in self.withheld
        groups = {IommuGroup(int(node.removeprefix("/dev/vfio/"))) for node in answer.device_nodes[1:]}
        assert list(answer.env.values()) == [",".join(chosen)]
        self.check_given(chosen, groups)
        event(f"given {count}")
        self.count += 1
        pod = self.pods[f"vm-{self.count}"] = Pod(f"vm-{self.count}", resource, chosen, groups)
        if start:
            self.start(pod)

    def check_given(self, chosen: list[DeviceId], groups: set[IommuGroup]) -> None:
        """An allocated device is free at this moment, by the host's own state."""
        for device in chosen:
            function = self.kernel.pci.functions.get(PciAddress(device))
            if function is not None:
                assert function.driver == "vfio-pci"
                assert not function.leaving
                assert function.group in groups
            else:
                assert self.kernel.mdev.devices[device].group in groups
        for group in groups:
            assert not self.in_use(group)
            assert all(self.kernel._is_friendly(member) for member in self.kernel.vfio.groups[group].members)

    @rule(data=st.data())
    @precondition(lambda self: self.pods)
    def vm_starts(self, data: st.DataObject) -> None:
        self.start(self.pods[data.draw(st.sampled_from(sorted(self.pods)))])

    def start(self, pod: Pod) -> None:
        for group in pod.groups:
            try:
                pod.processes.append(self.kernel.start_vm(group))
            except (OSError, KeyError):
                continue

    @rule(data=st.data())
    @precondition(lambda self: self.pods)
    def pod_ends(self, data: st.DataObject) -> None:
        pod = self.pods.pop(data.draw(st.sampled_from(sorted(self.pods))))
        for process in pod.processes:
            self.kernel.end_vm(process)

    @rule()
    def account_is_reported(self) -> None:
        self.rig.report_account(
            {
                (pod.resource, device): Consumer(namespace="default", pod=pod.name, container="compute")
                for pod in self.pods.values()
                for device in pod.devices
            }
        )

    @rule()
    def account_is_unknown(self) -> None:
        self.rig.report_account(None)

    @rule(resources=st.sets(RESOURCES, max_size=2))
    def resources_are_withheld(self, resources: set[ResourceName]) -> None:
        self.withheld = resources
        self.rig.withhold(resources)

    @rule()
    def kubelet_restarts(self) -> None:
        self.listed = {}

    # --- the agent

    @rule()
    def look(self) -> None:
        self.rig.look()

    @rule(seconds=st.sampled_from([0.3, 1.0, 3.0, 15.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.pass_time(seconds)

    @rule(torn=st.sampled_from([None, 0, 1, 100, 300]))
    def agent_is_killed(self, torn: int | None) -> None:
        self.rig.kill(torn)

    # --- invariants

    def in_use(self, group: IommuGroup | None) -> bool:
        return (
            group is not None and group in self.kernel.vfio.groups and self.kernel.vfio.groups[group].user is not None
        )

    @invariant()
    def no_device_and_no_group_is_given_twice(self) -> None:
        if hasattr(self, "pods"):
            devices = Counter(device for pod in self.pods.values() for device in pod.devices)
            groups = Counter(group for pod in self.pods.values() for group in pod.groups)
            assert not [device for device, count in devices.items() if count > 1]
            assert not [group for group, count in groups.items() if count > 1]

    @invariant()
    def every_device_is_in_one_list_and_the_unhealthy_say_why(self) -> None:
        if hasattr(self, "rig"):
            listed = Counter(device.id for resource in self.rig.view.resources for device in resource.devices)
            assert not [device for device, count in listed.items() if count > 1]
            assert all(
                device.healthy == (not device.reasons)
                for resource in self.rig.view.resources
                for device in resource.devices
            )

    @invariant()
    def of_what_is_withheld_pods_keep_what_they_have(self) -> None:
        if hasattr(self, "rig"):
            withheld = [resource for resource in self.rig.view.resources if resource.withheld]
            assert {resource.name for resource in withheld} <= self.withheld
            assert all(device.allocated_to is not None for resource in withheld for device in resource.devices)
            assert not any(resource.registered for resource in withheld)

    @invariant()
    def nothing_is_done_to_the_host(self) -> None:
        if hasattr(self, "kernel"):
            assert len(self.kernel.writes) == self.human_writes
            assert len(self.kernel.vfio.requests) <= self.human_requests
            assert not [path for path in self.kernel.reads if path.endswith(("/driver_override", "/uevent"))]

    def everything_recovers(self) -> None:
        """The host is repaired and all pods end: then all devices are offered, healthy and free again."""
        for pod in self.pods.values():
            for process in pod.processes:
                self.kernel.end_vm(process)
        self.pods.clear()
        for stranger in self.strangers:
            self.kernel.end_vm(stranger)
        self.all_is_mended()
        self.resources_are_withheld(set())
        for _ in range(4):
            self.rig.pass_time(15)
            self.rig.look()
            self.rig.pass_time(15)
            self.account_is_reported()
        self.rig.look()
        offered = {
            resource.name: {device.id: device.healthy for device in resource.devices}
            for resource in self.rig.view.resources
        }
        mdevs = dict.fromkeys(sorted(self.kernel.mdev.devices), True)
        assert {name: devices for name, devices in offered.items() if devices} == {
            "nvidia.com/TU104GL_TESLA_T4": {LEFT: True, RIGHT: True},
            "nvidia.com/TU106_GEFORCE_RTX_2060_REV__A": {RTX: True},
            "nvidia.com/GA102GL_A10": {A10: True},
            **({"nvidia.com/GRID_T4-8Q": mdevs} if mdevs else {}),
        }
        assert not [
            device for resource in self.rig.view.resources for device in resource.devices if device.allocated_to
        ]
