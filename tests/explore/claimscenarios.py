"""Scenarios of claims (DRA): whole GPUs for VMs, by a scheduler that may give one GPU to two claims."""

from collections.abc import Iterator, Mapping

from gpuvirt.agent.claims.preparing import Preparing
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.desired.observed import GpuNodeSpec
from gpuvirt.model.reasons import Reason
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from tests.explore.actions import (
    Admit,
    EndPod,
    Kill,
    LoseAccount,
    LoseLedger,
    MendAccount,
    Start,
    StartKubelet,
    StopKubelet,
    Want,
)
from tests.explore.claims import Bind, EndClaimer
from tests.explore.guard import Guard
from tests.explore.hostactions import Close, Open, OpenGroup, Reboot, StartVm
from tests.explore.scenario import Action, Scenario

GPU, NEXT, GROUP = PciAddress("0000:65:00.0"), PciAddress("0000:66:00.0"), 12
ONE = HostSpec(about="one A10 on nvidia", slots=(SlotSpec(at=GPU, board="A10", group=GROUP, numa=0),))
IN_ONE_GROUP = HostSpec(
    about="two A10 on nvidia in one IOMMU group",
    slots=(
        SlotSpec(at=GPU, board="A10", group=GROUP, numa=0),
        SlotSpec(at=NEXT, board="A10", group=GROUP, numa=0),
    ),
)
CLAIMS = GpuNodeSpec("claims")
RESTART, RESTARTED = (Kill(), Start()), (StopKubelet(), StartKubelet())


def _vm(name: str, gpu: PciAddress = GPU) -> tuple[Action, ...]:
    return Bind(name, gpu), StartVm(name), EndClaimer(name)


def _of(*actors: tuple[Action, ...], host: HostSpec = ONE, spec: GpuNodeSpec = CLAIMS) -> Scenario:
    return Scenario(host, spec, actors, begin_s=20.0)


CLAIM_SCENARIOS: Mapping[str, Scenario] = {
    "claims-of-one-gpu": _of(_vm("a"), _vm("b")),
    "claims-of-one-group": _of(_vm("a"), _vm("b", NEXT), host=IN_ONE_GROUP),
    "claims-and-a-killed-agent": _of(_vm("a"), RESTART),
    "claims-and-a-lost-ledger": _of((*_vm("a")[:2], Bind("b", GPU)), (Kill(), LoseLedger(), Start())),
    "claims-and-a-kubelet-restart": _of(_vm("a"), RESTARTED, (Bind("b", GPU),)),
    "claims-and-a-reboot": _of((*_vm("a")[:2], Reboot(), Start()), (Bind("b", GPU),)),
    "claims-and-lost-accounts": _of(_vm("a"), (LoseAccount(), MendAccount()), (Bind("b", GPU),)),
    "claims-after-a-plugin": _of(
        (Admit("vm"), StartVm("vm"), EndPod("vm")),
        (Want("claims"),),
        (Bind("a", GPU),),
        spec=GpuNodeSpec("passthrough"),
    ),
    "claims-before-a-plugin": _of(_vm("a"), (Want("passthrough"), Admit("vm")), (EndPod("vm"),)),
    "claims-or-containers": _of(_vm("a"), (Want("container"), Want("claims"))),
    "claims-of-a-used-gpu": _of((Bind("a", GPU), EndClaimer("a")), (Open("job", GPU), Close("job"))),
    "claims-beside-a-vm-by-hand": _of((*_vm("a"), Bind("b", GPU)), (OpenGroup("qemu", GROUP), Close("qemu"))),
    "claims-of-a-vm-that-runs-on": _of(
        (Bind("a", GPU), StartVm("a"), EndClaimer("a", leaves_vm=True), Close("a")), (Bind("b", GPU),)
    ),
}


def _nothing_against(*_: object) -> Iterator[Reason]:
    return iter(())


CLAIM_GUARDS: Mapping[str, Guard] = {
    "claims: the last line before a GPU is another's": Guard(
        Preparing, "_against", _nothing_against, ("claims-of-one-gpu", "claims-of-one-group")
    ),
}
