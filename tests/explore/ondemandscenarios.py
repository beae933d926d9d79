"""Scenarios of on-demand vGPUs: one T4 that takes the shape of the pod that starts."""

import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from typing_extensions import override

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.sysfs import MDEVS
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.desired.observed import GpuNodeSpec
from gpuvirt.model.desired.settings import Settings, ShareSettings
from gpuvirt.paths import HostPath
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from tests.explore.actions import (
    DeleteByForce,
    DeleteCheckpoint,
    EndPod,
    Kill,
    LoseAccount,
    LoseApiServer,
    LoseLedger,
    MendAccount,
    Pause,
    ReachApiServer,
    RegisterOther,
    Start,
    StartKubelet,
    StopKubelet,
    Want,
)
from tests.explore.command import Command, DeleteVgpu
from tests.explore.hostactions import Block, Mend, Reboot, Refuse
from tests.explore.kubelet import Key
from tests.explore.observer import UNITS
from tests.explore.scenario import Action, Scenario
from tests.explore.world import World

GPU = PciAddress("0000:65:00.0")
T4 = HostSpec(about="one T4 for vGPUs on demand", slots=(SlotSpec(at=GPU, board="T4", group=12, numa=0),))
HALF, WHOLE = "tencent.com/vgpu-233", "tencent.com/vgpu-234"
SLOWLY_TAKEN_WITHIN_S = 8.0
"""The time that a kubelet on a slow disk takes to record an answer; the agent expects 10 s."""
CREATE = f"/sys/class/mdev_bus/{GPU}/mdev_supported_types/nvidia-233/create"


@dataclass(frozen=True)
class AdmitVgpu(Action):
    """The kubelet admits a pod that requests a type of vGPU, by a new id, or `again` by that of an ended pod."""

    pod: str
    resource: str
    again: bool = False
    init: bool = False
    """Whether an init container has the vGPU before the main one."""
    fails: bool = False
    """Whether the kubelet refuses the pod after Allocate, such as for another resource."""
    when_empty: bool = False
    """Whether the kubelet admits the pod only while no vGPU exists."""

    @override
    def enabled(self, world: World) -> bool:
        if self.when_empty and world.kernel.mdev.devices:
            return False
        return world.agents.running is not None and not world.kubelet.is_admitting and any(self._free(world))

    @override
    def act(self, world: World) -> None:
        containers = ("nvidia", "main") if self.init else ("main",)
        key = next(self._free(world))
        world.on_demand.had.add(key)
        world.admit(self.pod, (key,), *containers)
        pod = world.kubelet.pods[self.pod]
        pod.fails, pod.taken_within_s = self.fails, SLOWLY_TAKEN_WITHIN_S

    def _free(self, world: World) -> Iterator[Key]:
        free = (key for key in world.kubelet.free() if key[0] == self.resource)
        return (key for key in free if (key in world.on_demand.had) is self.again)


@dataclass(frozen=True)
class BeginDeletion(Action):
    """A pod is being deleted, which lasts until its container has ended."""

    pod: str

    @override
    def enabled(self, world: World) -> bool:
        return world.kubelet.runs(self.pod)

    @override
    def act(self, world: World) -> None:
        world.on_demand.ending.begin(world.kubelet.pods[self.pod])


@dataclass(frozen=True)
class RemoveByHand(Action):
    """An admin removes the vGPU of a pod before the kubelet asks whether its container may start."""

    is_by_hand = True
    pod: str

    @override
    def enabled(self, world: World) -> bool:
        return world.kubelet.runs(self.pod) and world.kubelet.pods[self.pod].may_start

    @override
    def act(self, world: World) -> None:
        for vgpu in world.kubelet.pods[self.pod].vgpus:
            world.pulled.add(vgpu)
            world.kernel.write(HostPath(f"{MDEVS}/{vgpu}/remove"), b"1")


def _of(
    *actors: tuple[Action, ...],
    first: tuple[Action, ...] = (),
    shares: bool = False,
    begin_s: float = 3.0,
    job_ends: bool = False,
) -> Scenario:
    settings = Settings(shares=ShareSettings(units=UNITS))
    spec = GpuNodeSpec("on-demand")
    return Scenario(T4, spec, actors, first=first, settings=settings, shares=shares, begin_s=begin_s, job_ends=job_ends)


RESTART = (Kill(), Start())
ON_DEMAND_SCENARIOS: Mapping[str, Scenario] = {
    "on-demand-two-types": _of((AdmitVgpu("p", HALF), EndPod("p")), (AdmitVgpu("q", WHOLE),)),
    "on-demand-id-again": _of((AdmitVgpu("p", HALF), EndPod("p"), AdmitVgpu("q", HALF, again=True)), RESTART),
    "on-demand-removal-or-admission": _of(
        (AdmitVgpu("p", HALF), AdmitVgpu("q", HALF), EndPod("p")), (AdmitVgpu("r", HALF),)
    ),
    "on-demand-removed-by-hand": _of((AdmitVgpu("p", HALF), RemoveByHand("p"), EndPod("p"), AdmitVgpu("q", HALF))),
    "on-demand-killed": _of((AdmitVgpu("p", HALF), AdmitVgpu("q", HALF)), RESTART),
    "on-demand-or-whole": _of((AdmitVgpu("p", HALF), EndPod("p")), (Want("passthrough"), Want("on-demand"))),
    "on-demand-deleted-by-force": _of((AdmitVgpu("p", HALF), DeleteByForce("p")), (AdmitVgpu("q", HALF),), RESTART),
    "on-demand-lost-ledger": _of((AdmitVgpu("p", HALF),), (Kill(), LoseLedger(), Start())),
    "on-demand-lost-account": _of((AdmitVgpu("p", HALF),), (LoseAccount(), MendAccount()), (EndPod("p"),)),
    "on-demand-and-kubelet": _of(
        (AdmitVgpu("p", HALF), EndPod("p")), (StopKubelet(), DeleteCheckpoint(), StartKubelet())
    ),
    "on-demand-create-fails": _of((AdmitVgpu("p", HALF),), (Refuse(CREATE, errno.EIO), Mend())),
    "on-demand-refused-pod": _of(
        (AdmitVgpu("p", HALF, fails=True), AdmitVgpu("q", HALF, again=True, init=True)), (AdmitVgpu("r", HALF),)
    ),
    "on-demand-id-of-a-refused-pod": _of(
        (AdmitVgpu("q", HALF, again=True),), first=(AdmitVgpu("p", HALF, fails=True), RegisterOther()), begin_s=21.0
    ),
    "on-demand-init-container": _of((AdmitVgpu("p", HALF, init=True), EndPod("p")), (AdmitVgpu("q", HALF, init=True),)),
    "on-demand-init-container-and-restart": _of((AdmitVgpu("p", HALF, init=True),), RESTART),
    "on-demand-lasting-deletion": _of(
        (AdmitVgpu("p", HALF), BeginDeletion("p"), EndPod("p"), AdmitVgpu("q", HALF)), (AdmitVgpu("r", HALF),)
    ),
    "on-demand-create-is-blocked": _of(
        (Block(CREATE), AdmitVgpu("p", HALF), Mend()), (AdmitVgpu("q", WHOLE),), RESTART
    ),
    "on-demand-power-loss": _of((AdmitVgpu("p", HALF),), (Reboot(), Start())),
    "on-demand-power-loss-after-a-start": _of((AdmitVgpu("p", HALF), Reboot(), Start(), AdmitVgpu("q", HALF))),
    "on-demand-without-api-server": _of(
        (AdmitVgpu("p", HALF), LoseApiServer(), StopKubelet(), StartKubelet(), Pause(34.0), ReachApiServer())
    ),
    "on-demand-without-folder": _of(
        (AdmitVgpu("p", HALF), LoseApiServer(), StopKubelet(), StartKubelet(), Pause(50.0), ReachApiServer()),
        first=(AdmitVgpu("o", HALF),),
    ),
    "on-demand-lost-ledger-and-account": _of(
        (AdmitVgpu("p", HALF),), (Kill(), LoseLedger(), LoseAccount(), Start(), Pause(60.0), MendAccount())
    ),
    "on-demand-or-command": _of((Command(GPU, DesiredDriver.PASSTHROUGH),), (AdmitVgpu("p", HALF),)),
    "on-demand-or-vgpu-command": _of((AdmitVgpu("p", HALF), EndPod("p")), (DeleteVgpu(GPU), DeleteVgpu(GPU))),
    "on-demand-removal-ends": _of(
        (AdmitVgpu("q", HALF, init=True, when_empty=True),),
        first=(AdmitVgpu("p", HALF), EndPod("p")),
        begin_s=31.153,
        job_ends=True,
    ),
    "on-demand-back-at-once": _of((Want("passthrough"), Want("on-demand"), AdmitVgpu("p", HALF))),
    "on-demand-or-shared": _of((AdmitVgpu("p", HALF), EndPod("p")), (Want("shared"), Want("on-demand")), shares=True),
}
