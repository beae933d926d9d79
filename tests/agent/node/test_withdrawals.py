"""Whether a GPU's vGPUs may be removed: not before the kubelet has answered that it no longer counts them."""

import pytest
from msgspec.structs import replace

from gpuvirt.facts.ids import DeviceId
from gpuvirt.facts.pci import Unread
from gpuvirt.model.allocation.ledger import KubeletAccount
from gpuvirt.model.allocation.podallocations import ResourceRules
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.offers.withdrawal import KubeletCount, Withdrawal
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.clock import BEGINNING
from tests.agent.node.pictures import VGPUS, observed

UNREAD = Unread(HostPath("the kubelet's pod resources"), errno=5)


def host() -> Inventory:
    inventory = observed().inventory
    assert inventory is not None
    return inventory


HOST = host()
VGPU = min(HOST.vgpus)
GPU = HOST.vgpus[VGPU].gpu
OTHER = next(gpu for gpu in sorted(HOST.gpus) if gpu != GPU)
ANSWER = KubeletAccount(BEGINNING, 20.0, {})
COUNTED = replace(ANSWER, counted=frozenset({(VGPUS, DeviceId(VGPU))}))
COUNT = KubeletCount(HOST, ANSWER, ResourceRules(ours=frozenset({VGPUS})))
LEAVES = Withdrawal(vgpus=frozenset({VGPU}), at_s=10.0)


@pytest.mark.parametrize(
    ("withdrawal", "count", "code"),
    [
        (LEAVES, COUNT, None),
        (LEAVES, replace(COUNT, account=None), ReasonCode.ALLOCATIONS_UNKNOWN),
        (LEAVES, replace(COUNT, inventory=None), ReasonCode.ALLOCATIONS_UNKNOWN),
        (replace(LEAVES, at_s=30.0), COUNT, ReasonCode.ALLOCATIONS_UNKNOWN),
        (LEAVES, replace(COUNT, account=COUNTED), ReasonCode.STILL_ALLOCATABLE),
        (LEAVES, replace(COUNT, account=replace(ANSWER, counted=UNREAD)), ReasonCode.STILL_ALLOCATABLE),
        (Withdrawal(), replace(COUNT, account=replace(ANSWER, counted=UNREAD)), None),
    ],
)
def test_withdrawn_vgpus_are_settled_once_the_kubelet_does_not_count_them(
    withdrawal: Withdrawal, count: KubeletCount, code: ReasonCode | None
) -> None:
    found = withdrawal.why_unsettled(count, GPU)
    assert (found.code if found is not None else None) is code


def test_an_unread_count_says_so_and_another_gpu_does_not_wait_for_counted_vgpus() -> None:
    unread = LEAVES.why_unsettled(replace(COUNT, account=replace(ANSWER, counted=UNREAD)), OTHER)
    assert unread is not None
    assert UNREAD.path in unread.text
    assert LEAVES.why_unsettled(replace(COUNT, account=COUNTED), OTHER) is None
