"""The steps from a device to a VM, and the blocker."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.cli.evidence import address_of, gather
from gpuvirt.diagnosis.explaining import explain_device
from gpuvirt.diagnosis.explanation import DeviceExplanation, StageName, StageOutcome
from gpuvirt.diagnosis.target import is_target
from gpuvirt.facts.ids import IommuGroup, PciAddress, ResourceName
from gpuvirt.loops.serialworker import ThreadWorker
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.kubevirt.kubevirt import parse
from gpuvirt.model.offers.view import AgentView, NodeView, ResourceView
from gpuvirt.model.reasons import FindingCode, Reason, ReasonCode, Seen, notoffered, refusals
from gpuvirt.model.shares.otherplugins import registered_elsewhere
from gpuvirt_sim.devices.nvidia import gpu_uuid
from gpuvirt_sim.devices.platform import PlatformSpec
from gpuvirt_sim.hostspec import host_names
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.kubelet.containers import Container
from tests.agent.kubelet.kubeletnode import CLOCK, Cluster, cluster_on, until_so
from tests.agent.ondemand.kubeletnodes import T4_1Q, T4_8Q, T4_16Q, Node, node_with
from tests.diagnosis.doctor.sickhost import around, evidence, host, simulated

A10 = "nvidia.com/GA102GL_A10"
GPU, OTHER = "0000:65:00.0", "0000:ca:00.0"
VGPU = "0000:02:00.0"
T4 = "0000:10:00.0"


def blocked_at(explanation: DeviceExplanation) -> StageName | None:
    return next((stage.step for stage in explanation.stages if stage.standing is StageOutcome.BLOCKED), None)


def rebound(kernel: SimKernel, address: str, driver: str | None) -> SimKernel:
    kernel.rebind(PciAddress(address), driver)
    return kernel


def gpu_lost(kernel: SimKernel) -> SimKernel:
    return after(kernel, lambda kernel: kernel.unplug(PciAddress(GPU)))


def gpu_fallen(kernel: SimKernel) -> SimKernel:
    return after(kernel, lambda kernel: kernel.fall_off_bus(PciAddress(GPU)))


def node_lost(kernel: SimKernel) -> SimKernel:
    return after(kernel, lambda kernel: kernel.delete_node(IommuGroup(12)))


def after(kernel: SimKernel, act: Callable[[SimKernel], object]) -> SimKernel:
    act(kernel)
    return kernel


def without_bars(driver: str) -> SimKernel:
    return host(PlatformSpec(bars_unassigned=(GPU,)), driver=driver)


NOTHING_PERMITTED = "{kind: KubeVirt, spec: {configuration: {permittedHostDevices: {}}}}"
WITH_VFS = "about: x\nslots: [{at: '0000:65:00.0', board: A10, group: 12, vfs: 4}]"
BANNED = "install vfio-pci /bin/false\n"
NEIGHBOUR = (
    "about: x\nslots: [{at: '0000:65:00.0', board: A10, driver: DRIVER, group: 7},"
    " {at: '0000:06:00.0', board: nvme, group: 7}]"
)


@pytest.mark.parametrize(
    ("build", "step", "code", "fix"),
    [
        (lambda: gpu_lost(host()), StageName.BUS, FindingCode.NO_SUCH_DEVICE, "rescan"),
        (lambda: gpu_fallen(host()), StageName.BUS, ReasonCode.FELL_OFF_BUS, "reset"),
        (lambda: without_bars("native"), StageName.BUS, ReasonCode.BAR_UNASSIGNED, "Above 4G Decoding"),
        (lambda: without_bars("none"), StageName.BUS, ReasonCode.BAR_UNASSIGNED, "Above 4G Decoding"),
        (lambda: without_bars("vfio-pci"), StageName.BUS, ReasonCode.BAR_UNASSIGNED, "Above 4G Decoding"),
        (lambda: host(simulated="2xA10-no-iommu"), StageName.IOMMU_GROUP, FindingCode.IOMMU_OFF, "VT-d"),
        (
            lambda: host(PlatformSpec(acpi=("DMAR",)), "2xA10-no-iommu", "native"),
            StageName.IOMMU_GROUP, FindingCode.IOMMU_OFF, "intel_iommu=on",
        ),
        (
            lambda: simulated(NEIGHBOUR.replace("DRIVER", "vfio-pci")),
            StageName.WHOLE_GROUP, ReasonCode.GROUP_NOT_VIABLE, "another slot",
        ),
        (
            lambda: simulated(NEIGHBOUR.replace("DRIVER", "none")),
            StageName.WHOLE_GROUP, ReasonCode.GROUP_NOT_VIABLE, "another slot",
        ),
        (lambda: rebound(host(), GPU, None), StageName.DRIVER, ReasonCode.NO_DRIVER, "gpuvirt vfio bind"),
        (
            lambda: host(PlatformSpec(modules=("nvidia",), available=()), driver="native"),
            StageName.DRIVER, ReasonCode.VFIO_MISSING, "linux-modules-extra",
        ),
        (
            lambda: host(PlatformSpec(files={"/etc/modprobe.d/x.conf": BANNED}), driver="native"),
            StageName.DRIVER, ReasonCode.NATIVE_DRIVER, "gpuvirt vfio bind",  # the module is loaded already
        ),
        (lambda: host(driver="nouveau"), StageName.DRIVER, ReasonCode.NATIVE_DRIVER, "gpuvirt vfio bind"),
        (lambda: simulated(WITH_VFS), StageName.DRIVER, ReasonCode.NO_VGPUS, "gpuvirt vgpu create 0000:65:00.0 A10-"),
        (lambda: node_lost(host()), StageName.NODE, ReasonCode.NODE_MISSING, "udev"),
        (host, StageName.REGISTERED, ReasonCode.KUBELET_AWAY, "--kubelet-dir"),
    ],
)  # fmt: skip
def test_the_blocker_of_a_gpu_is_named_at_its_step(
    build: Callable[[], SimKernel], step: StageName, code: object, fix: str
) -> None:
    explanation = explain_device(evidence(build()), GPU)
    assert explanation.blocker is not None
    assert (blocked_at(explanation), explanation.blocker.code) == (step, code)
    assert fix in "\n".join(explanation.blocker.fix)
    assert [stage.step for stage in explanation.stages] == list(StageName)
    assert {stage.standing for stage in explanation.stages[: list(StageName).index(step)]} <= {StageOutcome.OK}


def test_a_refused_driver_change_is_the_blocker() -> None:
    seen = evidence(host(driver="nouveau"))
    refused = Reason(ReasonCode.IN_USE, GPU, "is in use by Xorg (pid 7)", (Seen("/proc/7/fd"),), "end that process")
    explanation = explain_device(replace(seen, view=replace(seen.view, problems=(refused,))), GPU)
    assert explanation.blocker is not None
    assert (blocked_at(explanation), explanation.blocker.code, explanation.blocker.fix) == (
        StageName.DRIVER,
        refused.code,
        (refused.fix,),
    )


def test_a_withdrawal_that_waits_names_what_it_waits_for() -> None:
    seen, refused = evidence(host()), refusals.in_use(GPU, (), forcible=False, unseen="/dev/vfio/12 is open")
    gone = tuple(
        replace(gpu, reasons=(notoffered.withdrawn(GPU),)) if gpu.address == GPU else gpu for gpu in seen.view.gpus
    )
    explanation = explain_device(replace(seen, view=replace(seen.view, gpus=gone, problems=(refused,))), GPU)
    assert explanation.blocker is not None
    assert (blocked_at(explanation), explanation.blocker.code) == (StageName.OFFERED, ReasonCode.WITHDRAWN)
    waits = "that waits (InUse): it can't be leased for the change: its IOMMU group is open"
    assert waits in explanation.blocker.message
    assert "/dev/vfio/12 is open" in str(explanation.blocker.seen)
    assert explanation.blocker.fix == ("stop the VM that uses it; or to keep it for VMs, set mode passthrough for it",)


def test_a_name_that_may_be_a_node_is_told_how_to_ask_for_it() -> None:
    explanation = explain_device(evidence(host()), "node01")
    assert explanation.blocker is not None
    assert "node/NAME" in str(explanation.blocker.fix)


def test_a_function_that_is_no_gpu_is_reported() -> None:
    explanation = explain_device(evidence(host()), "17:00.0")
    assert explanation.blocker is not None
    assert (explanation.blocker.code, explanation.blocker.subject) == (FindingCode.NOT_A_GPU, "0000:17:00.0")


@pytest.mark.parametrize("target", ["nvidia.com/GA102_A10", "GA102GL_A1O", "nvidia.com/a10"])
def test_a_misspelt_resource_gets_a_suggestion(target: str) -> None:
    explanation = explain_device(evidence(host()), target)
    assert explanation.blocker is not None
    assert explanation.blocker.code is FindingCode.NO_SUCH_RESOURCE
    assert explanation.blocker.message.endswith(f"did you mean {A10}?")


def test_a_resource_without_devices_is_not_listed_as_offered() -> None:
    seen = evidence(host())
    empty = ResourceView(ResourceName("nvidia.com/GA102GL_A40"), ())
    explanation = explain_device(
        replace(seen, view=replace(seen.view, resources=(*seen.view.resources, empty))), "GA102GL_A41"
    )
    assert explanation.blocker is not None
    assert explanation.blocker.seen[0].value == f"offers {A10}"
    assert "A40" not in explanation.blocker.message


@pytest.mark.parametrize("target", ["GA102GL_A10", A10])
def test_a_resource_is_explained_by_its_best_device(target: str) -> None:
    kernel = host()
    kernel.delete_node(IommuGroup(12))
    explanation = explain_device(evidence(kernel), target)
    assert (explanation.resource, explanation.device) == (A10, OTHER)


def test_a_sibling_function_is_not_offered_unless_configured() -> None:
    explanation = explain_device(evidence(host(simulated="4xRTX2060")), "0000:04:00.1")
    assert explanation.blocker is not None
    assert (blocked_at(explanation), explanation.blocker.code) == (StageName.OFFERED, ReasonCode.KIND_NOT_OFFERED)


def test_a_gpu_with_vgpus_is_explained_by_its_vgpus() -> None:
    seen = evidence(host(simulated="4xT4"))
    explanation = explain_device(seen, "0000:3b:00.0")
    assert explanation.resource == "nvidia.com/GRID_T4-8Q"
    assert explanation.device is not None
    assert explain_device(seen, explanation.device) == replace(explanation, target=explanation.device)
    assert explain_device(evidence(host(simulated="4xL40S")), "0000:25:00.4").resource == "nvidia.com/NVIDIA_L40S-12Q"


@pytest.mark.parametrize("name", host_names())
def test_every_gpu_and_resource_without_a_kubelet_has_a_single_blocker(name: str) -> None:
    seen = evidence(host(simulated=name))
    view: NodeView = seen.view
    for target in (*(gpu.address for gpu in view.gpus), *(resource.name for resource in view.resources)):
        explanation = explain_device(seen, target)
        assert explanation.blocker is not None, "the host has no kubelet"
        assert [stage.standing for stage in explanation.stages].count(StageOutcome.BLOCKED) == 1


@pytest.mark.parametrize("text", ["", "a b", "nvidia.com/", "x/y/z", "\x1b", "-", "é"])
def test_text_that_is_no_target(text: str) -> None:
    assert not is_target(text)


class TestWithAgent:
    """With a running agent and kubelet."""

    @staticmethod
    async def explain_device(
        node: Cluster | Node, folder: Path, target: str, kubevirt: str | None = None
    ) -> DeviceExplanation:
        (folder / "proc" / str(os.getpid())).mkdir(parents=True, exist_ok=True)
        kubevirts = parse(kubevirt, where="test") if kubevirt is not None else None
        surroundings = replace(
            around(folder, None, kubevirts), clock=CLOCK, state_file=folder / "node.json", procs=(folder / "proc",)
        )
        # In another thread, since the simulated kubelet runs in this one.
        seen = await ThreadWorker("doctor").run(lambda: gather(node.kernel, surroundings), name="gather", timeout_s=60)
        return explain_device(seen, target)

    async def until_free(self, node: Cluster, folder: Path) -> None:
        async def free() -> bool:
            return (await self.explain_device(node, folder, A10)).blocker is None

        await until_so(free)

    async def test_a_free_offered_gpu_has_no_blocker(self, short_path: Path) -> None:
        async with cluster_on("2xA10", short_path) as node:
            await self.until_free(node, short_path)
            explanation = await self.explain_device(node, short_path, GPU)
            assert explanation.stages[-1].standing is StageOutcome.SKIPPED
            refused = await self.explain_device(
                node, short_path, A10, "{kind: KubeVirt, spec: {configuration: {permittedHostDevices: {}}}}"
            )
            assert refused.blocker is not None
            assert (blocked_at(refused), refused.blocker.code) == (StageName.PERMITTED, FindingCode.NOT_PERMITTED)
            assert (await self.explain_device(node, short_path, A10, "kind: KubeVirt")).stages[
                -1
            ].standing is StageOutcome.OK

    async def test_a_gpu_allocated_to_a_pod_is_the_blocker(self, short_path: Path) -> None:
        async with cluster_on("2xA10", short_path) as node:
            await node.kubelet.run_pod("vm-a", Container("compute", {A10: 2}))

            async def held() -> bool:
                return any(
                    "vm-a" in stage.message for stage in (await self.explain_device(node, short_path, A10)).stages
                )

            await until_so(held)
            explanation = await self.explain_device(node, short_path, A10)
            assert explanation.blocker is not None
            assert (blocked_at(explanation), explanation.blocker.code) == (StageName.FREE, ReasonCode.ALLOCATED_TO_POD)

    @pytest.mark.parametrize("target", [GPU, A10])
    async def test_no_gpu_is_free_while_the_allocations_are_unknown(self, short_path: Path, target: str) -> None:
        async with cluster_on("2xA10", short_path) as node:
            await self.until_free(node, short_path)
            checkpoint = short_path / "device-plugins/kubelet_internal_checkpoint"
            checkpoint.write_bytes(checkpoint.read_bytes()[:20])

            async def unknown() -> bool:
                return (await self.explain_device(node, short_path, target)).blocker is not None

            await until_so(unknown)
            explanation = await self.explain_device(node, short_path, target)
            assert explanation.blocker is not None
            assert (blocked_at(explanation), explanation.blocker.code) == (
                StageName.FREE,
                ReasonCode.ALLOCATIONS_UNKNOWN,
            )
            assert explanation.blocker.subject == explanation.device
            assert "start the kubelet" in explanation.blocker.fix[0]

    async def test_a_resource_that_the_kubelet_does_not_count_is_the_blocker(self, short_path: Path) -> None:
        async with cluster_on("2xA10", short_path) as node:
            await self.until_free(node, short_path)
            node.kubelet.manager.updated(A10, {}, {})
            explanation = await self.explain_device(node, short_path, A10)
            assert explanation.blocker is not None
            assert (blocked_at(explanation), explanation.blocker.code) == (StageName.COUNTED, FindingCode.NOT_COUNTED)

    async def until_blocked(self, node: Node, folder: Path, target: str, *expected: object) -> DeviceExplanation:
        """Wait until a target is blocked by a code at a stage, which the agent's view shows a moment later."""
        while True:
            explanation = await self.explain_device(node, folder, target)
            code = explanation.blocker.code if explanation.blocker is not None else None
            if (code, blocked_at(explanation)) == expected:
                return explanation
            await CLOCK.sleep(0.05)

    async def test_a_type_that_an_idle_gpu_gives_on_demand_can_be_had(self, short_path: Path) -> None:
        async with node_with(2, short_path) as node:
            await self.until_blocked(node, short_path, T4_8Q, None, None)
            explanation = await self.explain_device(node, short_path, T4_8Q)
            assert (explanation.device, explanation.resource, explanation.on_demand) == (None, T4_8Q, True)
            assert explanation.resource_type == "GRID T4-8Q"
            assert [stage.step for stage in explanation.stages] == list(StageName)
            assert message_of(explanation, StageName.FREE) == "free 2 of 2; a vGPU is created when a pod starts"
            refused = await self.explain_device(node, short_path, T4_8Q, NOTHING_PERMITTED)
            assert blocked_at(refused) is StageName.PERMITTED

    async def test_an_idle_gpu_names_what_it_gives_on_demand(self, short_path: Path) -> None:
        async with node_with(1, short_path) as node:
            explanation = await self.until_blocked(node, short_path, T4, None, None)
            assert (explanation.device, explanation.resource, explanation.on_demand) == (T4, None, True)
            offered = message_of(explanation, StageName.OFFERED)
            assert offered.startswith(f"offered on demand as {T4_1Q} (GRID T4-1Q), ")
            assert f"{T4_16Q} (GRID T4-16Q)" in offered
            node.kubelet.manager.updated(T4_16Q, {}, {})
            uncounted = await self.explain_device(node, short_path, T4_16Q)
            assert blocked_at(uncounted) is StageName.COUNTED

    async def test_a_gpu_that_pods_fill_gives_nothing_on_demand(self, short_path: Path) -> None:
        async with node_with(1, short_path) as node:
            pod = await node.start("a", T4_16Q)
            await self.until_blocked(node, short_path, T4_16Q, ReasonCode.ALLOCATED_TO_POD, StageName.FREE)
            for target in (T4, *node.vgpus[pod.name]):
                explanation = await self.explain_device(node, short_path, target)
                assert (blocked_at(explanation), explanation.on_demand) == (StageName.FREE, False)
            other = await self.until_blocked(node, short_path, T4_8Q, FindingCode.ALL_ALLOCATED, StageName.BUS)
            assert other.blocker is not None
            assert other.blocker.seen == (Seen(T4, "carries 1 x GRID T4-16Q: pod default/a"),)


def message_of(explanation: DeviceExplanation, step: StageName) -> str:
    return next(stage.message for stage in explanation.stages if stage.step is step)


def test_an_empty_gpu_in_mode_on_demand_without_an_agent_lacks_the_agent_and_no_vgpus() -> None:
    sources = around(settings=Settings(mode=DesiredMode.ON_DEMAND))
    explanation = explain_device(gather(host(simulated="2xA10-sriov"), sources), GPU)
    assert explanation.blocker is not None
    assert (blocked_at(explanation), explanation.blocker.code) == (StageName.REGISTERED, ReasonCode.KUBELET_AWAY)


def test_a_type_that_fits_nowhere_on_demand_has_what_prevents_it_on_each_gpu() -> None:
    sources = around(settings=Settings(mode=DesiredMode.ON_DEMAND))
    blocker = explain_device(gather(host(simulated="2xA10-vgpu"), sources), "tencent.com/vgpu-597").blocker
    assert blocker is not None
    full, off = ((place.path, place.value) for place in blocker.seen)
    assert full == ("0000:4b:00.0", "carries 1 x NVIDIA A10-12Q, 1 x NVIDIA A10-4Q: no user")
    assert off[0] == "0000:b1:00.0"
    assert "its VFs are off" in off[1]
    assert blocker.code is FindingCode.ALL_ALLOCATED
    assert blocker.fix[-1] == "gpuvirt why 0000:b1:00.0"


AGENT = AgentView("test", 1, CLOCK.now(), plugin_only=False)


@pytest.mark.parametrize("reason", [None, registered_elsewhere(VGPU, "nvidia.com/gpu", "GPU-1")])
def test_a_shared_gpu_is_blocked_by_why_its_units_are_withheld_and_by_nothing_that_vms_need(
    reason: Reason | None,
) -> None:
    found = evidence(host(simulated="vm-V100-8Q"))
    reasons = (reason,) if reason is not None else ()
    gpu = replace(found.view.gpus[0], units=0 if reason else 500, reasons=reasons)
    explanation = explain_device(replace(found, view=replace(found.view, gpus=(gpu,), agent=AGENT)), VGPU)
    assert blocked_at(explanation) is (StageName.OFFERED if reason else None)
    if reason is not None:
        assert explanation.blocker is not None
        assert explanation.blocker.code is ReasonCode.REGISTERED_ELSEWHERE
    else:
        offered = next(stage for stage in explanation.stages if stage.step is StageName.OFFERED)
        assert offered.message == "500 units of nvidia.com/vgpu are offered to pods"


def test_a_gpu_is_found_by_the_uuid_that_its_driver_shows() -> None:
    """A UUID is what nvidia-smi, CUDA_VISIBLE_DEVICES and DCGM call a GPU."""
    kernel = host()
    kernel.rebind(PciAddress(OTHER), "nvidia")
    uuid = gpu_uuid(PciAddress(OTHER))
    assert address_of(kernel, uuid) == address_of(kernel, uuid.lower()) == OTHER
    assert address_of(kernel, gpu_uuid(PciAddress(GPU))) is None, "vfio-pci shows none"
    assert address_of(kernel, OTHER) is None


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("GPU-00000000-1111-2222-3333-444444444444", "is not the UUID of a GPU on NVIDIA's driver"),
        ("MIG-00000000-1111-2222-3333-444444444444", "is the id of a MIG device; expected the UUID or the address"),
    ],
)
def test_an_id_of_nvidias_driver_without_a_gpu_is_no_resource(target: str, words: str) -> None:
    found = explain_device(evidence(host()), target).blocker
    assert found is not None
    assert (found.code, words in found.message) == (FindingCode.NO_SUCH_DEVICE, True)
