"""GPUs move between drivers while VMs and processes come and go: no VM ever gets a VFIO request for its GPU."""

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import FunctionKind, kind_of
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import Process, SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import NOBODY, change_drivers, driver_state, inputs
from tests.thoroughness import examples

pytestmark = pytest.mark.timeout(600, func_only=True)  # many examples on a busy host

HOSTS = ("4xT4", "4xRTX2060", "2xRTX4090-one-group", "2xA10", "8xMI300X")
NUMBERS = st.integers(0, 7)


class Killed(Exception):  # noqa: N818
    """The process was killed."""


class Moving(RuleBasedStateMachine):
    """A host whose GPUs move between drivers."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.kernel: SimKernel
        self.vms: list[tuple[Process, frozenset[str]]] = []
        self.processes: list[tuple[Process, str]] = []

    @override
    def teardown(self) -> None:
        self.folder.cleanup()

    @initialize(host=st.sampled_from(HOSTS), has_cdevs=st.booleans(), has_groups=st.booleans())
    def build(self, host: str, *, has_cdevs: bool, has_groups: bool) -> None:
        spec = replace(load_host(host), iommufd=has_cdevs, group_nodes=has_groups or not has_cdevs)
        self.kernel = build_host(spec)
        self.has_cdevs = has_cdevs
        folder = Path(self.folder.name)
        self.change_host = ChangeHost(
            self.kernel, SimTools(self.kernel), folder / "drivers.json", folder / "locks", folder / "device-plugins"
        )
        functions = self.kernel.pci.functions.items()
        self.gpus = [
            function for function, what in functions if kind_of(what.class_code, what.id.vendor) is FunctionKind.GPU
        ]

    @rule(number=NUMBERS, desired_vgpus=st.sampled_from(DesiredDriver), forced=st.booleans())
    def move(self, number: int, desired_vgpus: DesiredDriver, *, forced: bool) -> None:
        gpu = self.gpus[number % len(self.gpus)]
        orders = inputs(forced=forced)
        unit = driver_state(self.change_host, orders).inventory.gpus[gpu].unit
        reasons = change_drivers(self.change_host, unit, {gpu: desired_vgpus}, orders, lambda _: None)
        on_vfio = self.kernel.pci.functions[gpu].driver == "vfio-pci"
        if not reasons:
            assert on_vfio == (desired_vgpus is DesiredDriver.PASSTHROUGH)

    @rule(number=NUMBERS, desired_vgpus=st.sampled_from(DesiredDriver), after=st.integers(0, 6))
    def crash(self, number: int, desired_vgpus: DesiredDriver, after: int) -> None:
        """Move a GPU, and kill the process between two steps."""
        gpu = self.gpus[number % len(self.gpus)]
        unit = driver_state(self.change_host, NOBODY).inventory.gpus[gpu].unit
        taken: list[Step | RollBack] = []

        def report(step: Step | RollBack) -> None:
            taken.append(step)
            if len(taken) > after:
                raise Killed

        with suppress(Killed):
            change_drivers(self.change_host, unit, {gpu: desired_vgpus}, NOBODY, report)

    @rule(number=NUMBERS, bind=st.booleans())
    def start_vm(self, number: int, *, bind: bool) -> None:
        """Start a VM on all devices of a group, by group node or device nodes, or only open the devices."""
        groups = sorted(self.kernel.vfio.groups)
        group = groups[number % len(groups)]
        devices = list(self.kernel.vfio.groups[group].vfio_devices)
        with suppress(OSError):
            if self.kernel.vfio.group_nodes and (bind or not self.has_cdevs):
                process = self.kernel.start_vm(group)
            elif self.has_cdevs and devices:
                process = self.kernel.open_devices([self.name(device) for device in devices], bind=bind)
            else:
                return
            self.vms.append((process, frozenset(devices)))

    def name(self, device: str) -> str:
        """Return the name of a device's own node."""
        bus = "pci" if ":" in device else "mdev"
        return self.kernel.listdir(HostPath(f"/sys/bus/{bus}/devices/{device}/vfio-dev"))[0]

    @rule(number=NUMBERS)
    def end_vm(self, number: int) -> None:
        if self.vms:
            process, _ = self.vms.pop(number % len(self.vms))
            self.kernel.end_vm(process)

    @rule(number=NUMBERS)
    def compute(self, number: int) -> None:
        node = f"/dev/nvidia{number}"
        self.processes.append((self.kernel.start_process("python3", node), node))

    @rule(number=NUMBERS)
    def finish(self, number: int) -> None:
        if self.processes:
            process, _ = self.processes.pop(number % len(self.processes))
            self.kernel.end_vm(process)

    @rule(number=NUMBERS, driver=st.sampled_from(["vfio-pci", "nvidia", None]))
    def an_admin_rebinds(self, number: int, driver: str | None) -> None:
        gpu = self.gpus[number % len(self.gpus)]
        if not self.processes and not self.vms:  # otherwise the processes would be harmed
            with suppress(OSError):
                self.kernel.rebind(gpu, driver)

    @invariant()
    def no_vm_is_asked_for_its_gpu(self) -> None:
        if hasattr(self, "change_host"):
            assert self.kernel.vfio.requests == []

    @invariant()
    def what_a_vm_has_keeps_its_driver(self) -> None:
        for _, has in self.vms:
            functions = {self.kernel.pci.functions[PciAddress(device)].driver for device in has if ":" in device}
            assert functions <= {"vfio-pci"}
            assert {device for device in has if ":" not in device} <= self.kernel.mdev.devices.keys()


TestMoving = Moving.TestCase
TestMoving.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
