"""Random scenarios: the host, the desired state and the actors are derived from one number."""

from collections.abc import Mapping, Sequence
from random import Random

from msgspec.structs import replace

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
from tests.explore.hostactions import Close, Open, OpenGroup, PlugIn, StartVm, Unplug
from tests.explore.hotplugscenarios import REPLUG, TWO_NATIVE, UNSEEN, of_containers, of_shares
from tests.explore.scenario import Action, Scenario
from tests.explore.scenarios import (
    AWAY,
    BACK,
    BUILT_IN,
    CONTAINER,
    GPU,
    GROUP,
    HALVES,
    IN_ONE_GROUP,
    NATIVE,
    NEXT,
    ON_VFIO,
    PASSTHROUGH,
    RESTART,
    SHARER,
    T4,
    TO_HALVES,
    TO_WHOLE,
    TYPES,
)

Script = tuple[Action, ...]

POD: Script = (Admit("vm"), StartVm("vm"), EndPod("vm"))
KUBELET: Sequence[Script] = ((StopKubelet(), StartKubelet()), (LoseAccount(), MendAccount()))
CRASH: Script = (Kill(), LoseLedger(), Start())

HOSTS: Mapping[str, tuple[Scenario, Sequence[Script]]] = {
    "vfio": (
        Scenario(ON_VFIO, PASSTHROUGH, ()),
        (POD, (Admit("vm-b"),), (AWAY,), (AWAY, BACK), (OpenGroup("qemu", GROUP), Close("qemu")), *KUBELET),
    ),
    "vfio-killed": (Scenario(ON_VFIO, PASSTHROUGH, ()), (POD, (AWAY,), CRASH, (Kill(), Start()), *KUBELET)),
    "native": (
        Scenario(NATIVE, CONTAINER, ()),
        (POD, (BACK,), (BACK, AWAY), (Open("job", GPU), Close("job")), *KUBELET),
    ),
    "group": (
        Scenario(IN_ONE_GROUP, PASSTHROUGH, ()),
        (POD, (Admit("vm-b", NEXT),), (Admit("vm-c"),), (AWAY, BACK), CRASH, *KUBELET),
    ),
    "unplugged": (
        Scenario(ON_VFIO, PASSTHROUGH, ()),
        (POD, (Unplug(GPU), PlugIn(GPU)), (StopKubelet(), StartKubelet()) * 2, (Kill(), Start())),
    ),
    "vgpus": (
        Scenario(T4, HALVES, (), request=BUILT_IN, vgpus=TYPES),
        (POD, (Admit("vm-b"), EndPod("vm-b")), (TO_WHOLE,), (TO_WHOLE, TO_HALVES), CRASH, *KUBELET),
    ),
}
"""Each kind of host with its possible actions, without those of known findings."""

LATER: Mapping[str, tuple[Scenario, Sequence[Script]]] = {
    "containers": (
        of_containers(),
        (REPLUG, UNSEEN, (EndPod("cuda"),), (BACK,), (BACK, AWAY), (Open("job", GPU), Close("job")), RESTART, *KUBELET),
    ),
    "containers of two": (
        of_containers(host=TWO_NATIVE),
        (REPLUG, UNSEEN, (EndPod("cuda"),), (BACK,), (BACK, AWAY), POD, CRASH, *KUBELET),
    ),
    "shares": (of_shares(), (REPLUG, UNSEEN, (BACK,), (BACK, Want("shared")), SHARER, RESTART, KUBELET[0])),
}
"""The same of the numbers that end in 7. All other numbers keep the scenarios that they had before."""


def scenario_of(number: int) -> Scenario:
    """Return the scenario of a number."""
    random = Random(number)
    hosts = LATER if number % 10 == 7 else HOSTS
    first, scripts = hosts[random.choice(sorted(hosts))]
    actors = random.sample(list(scripts), random.randint(2, 4))
    return replace(first, actors=tuple(actors), whole=random.random() < 0.5)
