"""No step takes a device from a user that has come since the plan, whatever its native driver is."""

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.agent.change.steps import proving
from gpuvirt.agent.change.steps.changes import by_hand
from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.agent.change.steps.vgpusteps import Run
from gpuvirt.agent.change.unitchange import apply
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import Scheduler, SchedulerPolicy
from gpuvirt.hardware.access import proof as proof_module
from gpuvirt.hardware.access.kernel import Kernel, RealKernel
from gpuvirt.hardware.access.proof import Proof, ProofKind, UnprovenError
from gpuvirt.hardware.usage.nativeusers import read_native_users
from gpuvirt.model.allocation.podallocations import PodAllocations
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu, DesiredVgpus
from gpuvirt.model.change.plan import StepScope
from gpuvirt.model.change.steps import LoadModule, Return, RollBack, Step, Unbind
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath, HostRoots
from gpuvirt_sim.files.tree import DEVICE_NUMBERS, Link
from gpuvirt_sim.hostspec import HostSpec, SlotSpec, load_host
from gpuvirt_sim.kernel import Process, SimKernel
from tests.agent.change.changes import driver_state, inputs
from tests.agent.change.hostunit import NATIVE, PASSTHROUGH, W7900, W7900_AUDIO, HostUnit, on_native_drivers

Opens = Callable[[HostUnit, PciAddress], Process]
Moment = Callable[[Step | RollBack], bool]

MI300X = PciAddress(load_host("8xMI300X").slots[0].at)
FLEX = PciAddress(load_host("2xFlex170").slots[1].at)
RTX = PciAddress(load_host("4xRTX2060").slots[0].at)
AUDIO, USB, UCSI = (PciAddress(RTX.replace(".0", f".{number}")) for number in (1, 2, 3))
T4 = PciAddress("0000:3b:00.0")
L40S, VF = PciAddress("0000:25:00.0"), PciAddress("0000:25:00.4")
CUT_A30, IDLE_A30 = PciAddress("0000:17:00.0"), PciAddress("0000:ca:00.0")
EQUAL_SHARE = Scheduler(SchedulerPolicy.EQUAL_SHARE)

FUNCTIONS = [
    pytest.param("2xW7900", W7900, W7900, id="amdgpu"),
    pytest.param("8xMI300X", MI300X, MI300X, id="amdgpu without display"),
    pytest.param("2xW7900", W7900, W7900_AUDIO, id="audio of an amdgpu"),
    pytest.param("2xFlex170", FLEX, FLEX, id="Intel"),
    pytest.param("4xRTX2060", RTX, AUDIO, id="audio of an NVIDIA card"),
    pytest.param("4xRTX2060", RTX, USB, id="USB of an NVIDIA card"),
    pytest.param("4xRTX2060", RTX, UCSI, id="UCSI of an NVIDIA card"),
]


def opened(unit: HostUnit, function: PciAddress) -> Process:
    return unit.kernel.open_native(function)


def opened_as_a_service(unit: HostUnit, function: PciAddress) -> Process:
    return unit.kernel.open_native(function, "dcgm-exporter")


def opened_as_a_partition(unit: HostUnit, function: PciAddress) -> Process:
    """Start a process that has the last partition of an accelerator open, as a job in mode CPX has."""
    return unit.kernel.open_native(function, "python3", unit.kernel.nodes_of(function)[-1])


def mapped(unit: HostUnit, function: PciAddress) -> Process:
    """Start a process that has closed the node after it has mapped it."""
    process = unit.kernel.start_process("python3")
    unit.kernel.processes.map(process, unit.kernel.nodes_of(function)[0])
    return process


def before_the_module(step: Step | RollBack) -> bool:
    return isinstance(step, LoadModule)


def before_its_unbind(function: PciAddress) -> Moment:
    return lambda step: isinstance(step, Unbind) and step.address == function


def change(unit: HostUnit, target: DesiredGpu, at: Moment, act: Callable[[], object]) -> list[ReasonCode]:
    """Change a unit, and act once right before the first step for which `at` holds; return why it failed."""
    happened: list[Step | RollBack] = []

    def report(step: Step | RollBack) -> None:
        unit.taken.append(step)
        if not happened and at(step):
            happened.append(step)
            act()

    unit.taken.clear()
    outcome = apply(unit.change_host, unit.id, {unit.gpu: target}, inputs(), Run(report, by_hand(unit.id, None)))
    assert happened, "the moment has come"
    return [reason.code for reason in outcome.reasons]


@pytest.mark.parametrize("opens", [opened, opened_as_a_service, mapped])
@pytest.mark.parametrize("late", [False, True], ids=["during modprobe", "after the overrides"])
@pytest.mark.parametrize(("host", "gpu", "function"), FUNCTIONS)
def test_a_function_that_a_process_has_opened_since_the_plan_keeps_its_driver(
    host: str, gpu: PciAddress, function: PciAddress, late: bool, opens: Opens, tmp_path: Path
) -> None:
    unit = on_native_drivers(host, gpu, tmp_path)
    functions = unit.kernel.pci.functions
    drivers = {address: found.driver for address, found in functions.items()}
    at = before_its_unbind(function) if late else before_the_module

    assert change(unit, PASSTHROUGH, at, lambda: opens(unit, function)) == [ReasonCode.IN_USE]
    assert unit.kernel.native_nodes.unbound_in_use == []
    assert {address: found.driver for address, found in functions.items()} == drivers


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make device nodes")
def test_a_process_that_has_the_node_at_another_path_keeps_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `docker run --device /dev/dri/renderD128:/opt/gpu` gives it; the simulated GPU has the number of /dev/zero."""
    unit, node = on_native_drivers("2xW7900", W7900, tmp_path), tmp_path / "opt/gpu"
    tree = unit.kernel.tree
    tree.place(HostPath(f"{DEVICE_NUMBERS}/1:5"), Link(unit.kernel.readlink(HostPath(f"{DEVICE_NUMBERS}/226:128"))))
    node.parent.mkdir()
    os.mknod(node, 0o20600, os.makedev(1, 5))
    (tmp_path / "proc").mkdir()
    (tmp_path / f"proc/{os.getpid()}").symlink_to("/proc/self")
    real = RealKernel(HostRoots.under(tmp_path))
    monkeypatch.setattr(unit.kernel, "open_files", real.open_files)

    with ExitStack() as opened_late:
        late = before_its_unbind(W7900)
        codes = change(unit, PASSTHROUGH, late, lambda: opened_late.enter_context(node.open("rb")))
    assert codes == [ReasonCode.IN_USE]
    assert unit.driver == "amdgpu"
    with node.open("rb"):
        assert str(node) in str(unit.plan(PASSTHROUGH).reasons)
    assert unit.apply(PASSTHROUGH).reasons == (), "the process has closed it"


@pytest.mark.parametrize("at", [before_the_module, before_its_unbind(MI300X)], ids=["modprobe", "overrides"])
def test_a_job_in_a_partition_of_an_accelerator_keeps_its_driver(at: Moment, tmp_path: Path) -> None:
    """No link connects the node of a partition with its GPU, so without a topology it counts for each on amdgpu."""
    unit = on_native_drivers("8xMI300X", MI300X, tmp_path)
    other = PciAddress(load_host("8xMI300X").slots[1].at)

    assert change(unit, PASSTHROUGH, at, lambda: opened_as_a_partition(unit, other)) == [ReasonCode.IN_USE]
    assert unit.kernel.native_nodes.unbound_in_use == []


def test_a_partition_that_is_open_keeps_no_gpu_of_another_driver(tmp_path: Path) -> None:
    unit = on_native_drivers("8xMI300X", MI300X, tmp_path)
    opened_as_a_partition(unit, MI300X)
    unit.kernel.write(HostPath("/sys/bus/pci/drivers/amdgpu/unbind"), MI300X.encode())

    assert read_native_users(unit.kernel, [MI300X]) == {}


def test_a_change_stops_before_the_first_function_of_a_card_of_which_one_is_open(tmp_path: Path) -> None:
    unit = on_native_drivers("2xW7900", W7900, tmp_path)

    assert change(unit, PASSTHROUGH, before_its_unbind(W7900), lambda: opened(unit, W7900_AUDIO)) == [ReasonCode.IN_USE]
    assert not any(path.endswith("/unbind") for path, _ in unit.kernel.writes), "no function was taken"


def test_a_function_opened_between_two_unbinds_is_found_and_the_first_one_returns(tmp_path: Path) -> None:
    unit = on_native_drivers("2xW7900", W7900, tmp_path)

    codes = change(unit, PASSTHROUGH, before_its_unbind(W7900_AUDIO), lambda: opened(unit, W7900_AUDIO))
    assert codes == [ReasonCode.IN_USE]
    assert unit.kernel.native_nodes.unbound_in_use == []
    assert unit.driver == "amdgpu"


@pytest.mark.parametrize("command", ["dcgm-exporter", "nv-hostengine", "nvidia-persiste"])
@pytest.mark.parametrize(("host", "gpu", "function"), FUNCTIONS)
def test_the_name_of_a_service_of_nvidia_excuses_no_user_of_another_driver(
    host: str, gpu: PciAddress, function: PciAddress, command: str, tmp_path: Path
) -> None:
    unit = on_native_drivers(host, gpu, tmp_path)
    unit.kernel.open_native(function, command)

    assert [reason.code for reason in unit.plan(PASSTHROUGH).reasons] == [ReasonCode.IN_USE]


def test_an_nvidia_gpu_without_unbind_lock_is_walked(tmp_path: Path) -> None:
    unit = on_native_drivers("4xRTX2060", RTX, tmp_path)
    unit.kernel.tree.remove(proving.unbind_lock(unit.gpu))

    assert change(unit, PASSTHROUGH, before_its_unbind(unit.gpu), lambda: opened(unit, unit.gpu)) == [ReasonCode.IN_USE]
    assert unit.driver == "nvidia"


def test_a_forced_change_takes_a_function_from_its_native_users(tmp_path: Path) -> None:
    unit = on_native_drivers("2xW7900", W7900, tmp_path)
    unit.kernel.open_native(W7900)

    assert unit.apply(PASSTHROUGH, inputs(forced=True)).reasons == ()
    assert unit.driver == "vfio-pci"


def test_no_force_takes_a_function_that_has_a_vfio_device_by_now(tmp_path: Path) -> None:
    unit = on_native_drivers("2xW7900", W7900, tmp_path)
    unit.kernel.rebind(W7900, "vfio-pci")

    with pytest.raises(RefusedError):
        proving.forced(unit.kernel, W7900, "amdgpu", "unbind it")
    with pytest.raises(RefusedError):
        proving.forced(unit.kernel, W7900, "vfio-pci", "unbind it")


def test_what_cannot_be_seen_is_no_proof(tmp_path: Path) -> None:
    unit = on_native_drivers("2xW7900", W7900, tmp_path)
    kernel: Kernel = unit.kernel

    assert proving.walked(kernel, [W7900]).kind is ProofKind.WALK
    unit.kernel.processes.hide()
    with pytest.raises(RefusedError) as refused:
        proving.walked(kernel, [W7900])
    assert refused.value.reason.code is ReasonCode.PROCESSES_NOT_VISIBLE


def test_device_numbers_that_cannot_be_listed_are_no_proof(tmp_path: Path) -> None:
    unit = on_native_drivers("2xW7900", W7900, tmp_path)
    unit.kernel.tree.remove(DEVICE_NUMBERS)

    with pytest.raises(RefusedError) as refused:
        proving.walked(unit.kernel, [W7900])
    assert refused.value.reason.code is ReasonCode.PROCESSES_NOT_VISIBLE


def test_only_the_innermost_function_of_a_device_is_used_by_those_who_open_it(tmp_path: Path) -> None:
    unit = on_native_drivers("2xW7900", W7900, tmp_path)
    unit.kernel.open_native(W7900_AUDIO)

    assert read_native_users(unit.kernel, [W7900]) == {}
    found = read_native_users(unit.kernel, [W7900, W7900_AUDIO])
    assert isinstance(found, dict)
    assert list(found) == [W7900_AUDIO]


@pytest.mark.parametrize("iommufd", [False, True])
def test_a_vf_that_a_vm_has_opened_since_the_plan_keeps_its_gpu_from_the_native_driver(
    tmp_path: Path, iommufd: bool
) -> None:
    """The driver may reset the VFs when it takes their GPU."""
    unit = driverless_gpu_with_vfs(tmp_path, iommufd=iommufd)
    vf = unit.kernel.pci.functions[VF]
    group = vf.group
    assert group is not None

    def start_vm() -> None:
        if iommufd:
            unit.kernel.open_devices(unit.kernel.listdir(HostPath(f"{vf.folder}/vfio-dev")))
        else:
            unit.kernel.start_vm(group)

    assert change(unit, NATIVE, lambda step: isinstance(step, Return), start_vm) == [ReasonCode.IN_USE]
    assert unit.driver is None


@pytest.mark.parametrize("function", [L40S, VF])
def test_a_gpu_without_a_driver_gets_none_while_a_group_is_unread(tmp_path: Path, function: PciAddress) -> None:
    unit = driverless_gpu_with_vfs(tmp_path)
    unit.kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{function}/iommu_group"), errno.EIO)
    assert [reason.code for reason in unit.apply(NATIVE).reasons] == [ReasonCode.UNREAD]
    assert unit.taken == []
    unit.kernel.faults.heal()
    assert unit.apply(NATIVE).reasons == ()


def test_a_group_or_a_vf_that_is_unread_is_no_proof(tmp_path: Path) -> None:
    unit = driverless_gpu_with_vfs(tmp_path)
    functions = driver_state(unit.change_host).inventory.facts.functions
    unread = Unread(HostPath("/sys"), errno=errno.EIO)
    without_vf = {address: found for address, found in functions.items() if address != VF}
    unread_vf = {**functions, VF: replace(functions[VF], iommu_group=unread)}
    unread_gpu = {**functions, L40S: replace(functions[L40S], iommu_group=unread)}
    for known in (without_vf, unread_vf, unread_gpu):
        with pytest.raises(RefusedError) as refused:
            proving.driverless(unit.kernel, known, L40S, "probe it", unbound_here=False)
        assert refused.value.reason.code is ReasonCode.UNREAD
    assert proving.driverless(unit.kernel, functions, L40S, "probe it", unbound_here=False).is_valid


def test_the_users_of_vfs_count_after_an_unbind_and_those_of_other_removed_nodes_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unit = driverless_gpu_with_vfs(tmp_path)
    functions = driver_state(unit.change_host).inventory.facts.functions
    unit.kernel.start_process("qemu-system-x86", "/dev/vfio/devices/vfio7")
    assert proving.driverless(unit.kernel, functions, L40S, "probe it", unbound_here=True).is_valid
    group = functions[VF].iommu_group
    assert isinstance(group, int)
    user = unit.kernel.start_vm(group)
    with pytest.raises(RefusedError) as refused:
        proving.driverless(unit.kernel, functions, L40S, "probe it", unbound_here=True)
    assert (refused.value.reason.code, refused.value.reason.subject) == (ReasonCode.IN_USE, VF)
    monkeypatch.setattr(SimKernel, "pids", {user.pid})
    assert proving.driverless(unit.kernel, functions, L40S, "probe it", unbound_here=True).is_valid, "a lease"


def driverless_gpu_with_vfs(folder: Path, *, iommufd: bool = False) -> HostUnit:
    """Return a GPU that has lost its driver, and one of whose VFs is on vfio-pci."""
    slots = (SlotSpec(at=L40S, board="L40S", group=12, vfs=2),)
    unit = HostUnit(HostSpec(about="an L40S without a driver", iommufd=iommufd, slots=slots), L40S, folder)
    unit.kernel.rebind(VF, "vfio-pci")
    unit.kernel.rebind(L40S, None)
    return unit


def test_a_function_is_driverless_only_without_driver_and_without_a_pending_unbind(tmp_path: Path) -> None:
    unit = on_native_drivers("4xT4", T4, tmp_path)
    functions = driver_state(unit.change_host).inventory.facts.functions

    with pytest.raises(RefusedError) as bound:
        proving.driverless(unit.kernel, functions, T4, "probe it", unbound_here=True)
    assert bound.value.reason.code is ReasonCode.STEP_FAILED
    unit.kernel.rebind(unit.gpu, None)
    assert proving.driverless(unit.kernel, functions, T4, "probe it", unbound_here=False).kind is ProofKind.DRIVERLESS
    unit.kernel.processes.hide()
    with pytest.raises(RefusedError) as unseen:
        proving.driverless(unit.kernel, functions, T4, "probe it", unbound_here=False)
    assert unseen.value.reason.code is ReasonCode.PROCESSES_NOT_VISIBLE
    assert proving.driverless(unit.kernel, functions, T4, "probe it", unbound_here=True).is_valid


def test_a_vm_that_has_a_removed_node_open_may_have_the_function(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unit = on_native_drivers("4xT4", T4, tmp_path)
    functions = driver_state(unit.change_host).inventory.facts.functions
    unit.kernel.rebind(T4, None)
    user = unit.kernel.start_process("qemu-system-x86", "/dev/vfio/devices/vfio7")

    with pytest.raises(RefusedError) as refused:
        proving.driverless(unit.kernel, functions, T4, "probe it", unbound_here=False)
    assert refused.value.reason.code is ReasonCode.UNBIND_PENDING
    monkeypatch.setattr(SimKernel, "pids", {user.pid})
    assert proving.driverless(unit.kernel, functions, T4, "probe it", unbound_here=False).is_valid, "a lease"


@pytest.mark.parametrize(
    ("host", "gpu", "first", "target"),
    [
        pytest.param("4xT4", T4, {}, DesiredVgpus({"T4-4Q": 1}), id="CreateVgpu"),
        pytest.param("2xA30", IDLE_A30, {}, DesiredVgpus({"A30-1-6C": 1}), id="EnableVfs"),
        pytest.param("2xA30", CUT_A30, {}, DesiredVgpus({"A30-1-6C": 3}), id="CreateInstance or DestroyInstance"),
        pytest.param("4xT4", T4, {"T4-4Q": 1}, DesiredVgpus({"T4-4Q": 1}, scheduler=EQUAL_SHARE), id="SetScheduler"),
    ],
)
@pytest.mark.parametrize("calls", [0, 1], ids=["at the claim", "at the step"])
def test_every_step_asks_whether_a_pod_has_its_gpu_by_now(
    host: str, gpu: PciAddress, first: dict[str, int], target: DesiredVgpus, calls: int, tmp_path: Path
) -> None:
    unit = HostUnit(host, gpu, tmp_path)
    if first:
        assert unit.apply(DesiredGpu(DesiredDriver.NATIVE, DesiredVgpus(first))).reasons == ()
    writes, asked = len(unit.kernel.writes), list[Inventory]()

    def newest(inventory: Inventory) -> PodAllocations:
        asked.append(inventory)
        return PodAllocations({gpu: ("cuda/job",)}) if len(asked) > calls else PodAllocations()

    run = Run(unit.taken.append, by_hand(unit.id, newest))
    outcome = apply(unit.change_host, unit.id, {gpu: DesiredGpu(DesiredDriver.NATIVE, target)}, inputs(), run)
    assert [reason.code for reason in outcome.reasons] == [ReasonCode.PLAN_OUTDATED]
    assert "cuda/job" in outcome.reasons[0].text
    assert len(unit.kernel.writes) == writes
    changing = {"-cgi", "-dgi", "-dci", "-mig", "-shm", "-e", "-d", "-i set"}
    assert not [command for command in unit.tools.commands if changing & set(command)]


def test_a_step_asks_about_at_least_one_function() -> None:
    with pytest.raises(ValueError, match="at least one function"):
        StepScope(frozenset())


def test_a_proof_serves_its_devices_once() -> None:
    proof = Proof(ProofKind.WALK, [T4])
    with pytest.raises(UnprovenError, match="may be in use"):
        proof.spend(W7900)
    proof.spend(T4)
    with pytest.raises(UnprovenError, match="has ended"):
        proof.spend(T4)


@pytest.mark.parametrize("kind", [ProofKind.WALK, ProofKind.DRIVERLESS])
def test_a_proof_that_was_only_read_grows_stale(monkeypatch: pytest.MonkeyPatch, kind: ProofKind) -> None:
    """The computer may stop a process between its walk and its write for as long as it likes."""
    now_s = 100.0
    monkeypatch.setattr(proof_module, "monotonic", lambda: now_s)
    found, lease = Proof(kind, [T4], since_s=99.0), Proof(ProofKind.LEASE, ["a vGPU"])
    now_s = 99.0 + 4.9
    assert found.is_valid
    now_s = 99.0 + 5.0
    for stale in (found, Proof.joined(found), Proof.joined(lease, found)):
        assert not stale.is_valid
        with pytest.raises(UnprovenError, match="try again"):
            stale.spend(T4)
    lease.spend("a vGPU")


def test_the_age_of_a_proof_counts_from_the_begin_of_its_walk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The walk itself is where a process is most likely to be stopped."""
    amd, unbound = on_native_drivers("2xW7900", W7900, tmp_path), driverless_gpu_with_vfs(tmp_path)
    functions = driver_state(unbound.change_host).inventory.facts.functions
    monkeypatch.setattr(proof_module, "monotonic", lambda: 5.0)
    for began_s, is_valid in ((0.1, True), (0.0, False)):
        monkeypatch.setattr(proving, "monotonic", lambda: began_s)  # noqa: B023
        found = (
            proving.walked(amd.kernel, [W7900]),
            proving.vgpus_walked(amd.kernel, W7900, ()),
            proving.driverless(unbound.kernel, functions, L40S, "probe it", unbound_here=False),
        )
        assert {proof.is_valid for proof in found} == {is_valid}


def test_a_lease_serves_until_it_ends() -> None:
    proof = Proof(ProofKind.LEASE, [T4])
    proof.spend(T4)
    proof.spend(T4)
    proof.end()
    with pytest.raises(UnprovenError, match="has ended"):
        proof.spend(T4)


def test_proofs_are_joined_and_spent_together() -> None:
    lease, walk = Proof(ProofKind.LEASE, ["a vGPU"]), Proof(ProofKind.WALK, [T4])
    joined = Proof.joined(walk, lease)
    joined.spend(T4, "a vGPU")
    assert not walk.is_valid
    assert lease.is_valid
    with pytest.raises(UnprovenError):
        joined.spend(T4)
    lease.end()
    assert not Proof.joined(lease, Proof(ProofKind.WALK, [T4])).is_valid
    with pytest.raises(UnprovenError, match="nothing proves"):
        Proof.joined()
