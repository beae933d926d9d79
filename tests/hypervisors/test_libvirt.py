"""A host with libvirt and QEMU is read, and its VMs are saved, resumed, shut down and powered off."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpuvirt.model.workers.hypervisor import (
    Accepted,
    Action,
    Call,
    OutcomeUnknown,
    Power,
    Refused,
    VmKey,
    VmProof,
    VmsUnknown,
    WorkerVm,
)
from gpuvirt_schedules.hypervisors.connection import ChildHypervisor
from tests.hypervisors.libvirthost import MDEV, WORKERS, Server, key, libvirt_connected, server, uuid
from tests.hypervisors.simulated import CLOCK, PATIENCE_S, until, vms
from tests.web.certificates import Authority

pytestmark = pytest.mark.ring("libvirt")
BLOCKS = (
    "-object",
    "memory-backend-ram,id=shared,size=1M,share=on",
    "-device",
    "ivshmem-plain,memdev=shared,master=off,addr=0x10",
)
"""A device that QEMU can't save, as one of a GPU whose driver does not support it."""


@pytest.fixture(name="server")
def _server(short_path: Path, authority: Authority) -> Iterator[Server]:
    with server(short_path, authority) as running:
        yield running


@pytest.fixture
async def hypervisor(server: Server) -> AsyncIterator[ChildHypervisor]:
    async with libvirt_connected(server.credentials) as opened:
        yield opened


async def test_all_vms_are_read(server: Server, hypervisor: ChildHypervisor) -> None:
    server.host.virsh("start", "worker1")
    server.host.virsh("start", "worker2")
    server.host.virsh("managedsave", "worker2")
    found = await vms(hypervisor)
    assert {name: vm.power for name, vm in found.items()} == {
        "worker0": Power.OFF,
        "worker1": Power.ON,
        "worker2": Power.SUSPENDED,
    }
    assert found["worker1"] == WorkerVm(key(1), "worker1", str(uuid(1)), Power.ON, (), False)


async def test_a_vm_is_saved_and_resumed(server: Server, hypervisor: ChildHypervisor) -> None:
    assert await hypervisor.call(Call(VmProof(key(0)), Action.START)) == Accepted()
    found = await until(hypervisor, lambda found: not found["worker0"].is_changing)
    assert found["worker0"].power is Power.ON
    booted = server.host.virsh("domid", "worker0")
    assert await hypervisor.call(Call(VmProof(key(0)), Action.SUSPEND)) == Accepted()
    found = await until(hypervisor, lambda found: found["worker0"].power is Power.SUSPENDED)
    assert not found["worker0"].is_changing
    assert await hypervisor.call(Call(VmProof(key(0)), Action.START)) == Accepted()
    await until(hypervisor, lambda found: found["worker0"].power is Power.ON)
    assert server.host.virsh("domid", "worker0") != booted
    assert server.host.virsh("domstate", "worker0", "--reason") == "running (restored)", "its memory is the saved one"


async def test_a_save_that_takes_long_delays_no_reading(server: Server, hypervisor: ChildHypervisor) -> None:
    """QEMU answers nothing, as while it moves the memory of a vGPU."""
    for number in range(2):
        await hypervisor.call(Call(VmProof(key(number)), Action.START))
    await until(hypervisor, lambda found: not any(vm.is_changing for vm in found.values()))
    with server.host.stopped("worker0"):
        began_s = CLOCK.monotonic_s()
        assert await hypervisor.call(Call(VmProof(key(0)), Action.SUSPEND)) == Accepted()
        for _ in range(3):
            found = await vms(hypervisor)
            assert (found["worker0"].power, found["worker0"].is_changing) == (Power.ON, True)
            assert (found["worker1"].power, found["worker1"].is_changing) == (Power.ON, False)
        assert await hypervisor.call(Call(VmProof(key(1)), Action.SUSPEND)) == Accepted(), (
            "the other one is saved meanwhile"
        )
        await until(hypervisor, lambda found: found["worker1"].power is Power.SUSPENDED)
        assert CLOCK.monotonic_s() - began_s < PATIENCE_S, "no reading waited for the save until it was given up"
    found = await until(hypervisor, lambda found: found["worker0"].power is Power.SUSPENDED)
    await until(hypervisor, lambda found: not found["worker0"].is_changing)


async def test_more_saves_than_a_server_takes_of_one_connection(server: Server, hypervisor: ChildHypervisor) -> None:
    names = {number: f"worker{number}" for number in range(6)}
    for number, name in names.items():
        if number >= WORKERS:
            server.host.define(name, uuid(number))
        server.host.virsh("start", name)
    with ExitStack() as hanging:
        for name in names.values():
            hanging.enter_context(server.host.stopped(name))
        answers = await asyncio.gather(
            *(hypervisor.call(Call(VmProof(key(number)), Action.SUSPEND)) for number in names)
        )
        assert answers == [Accepted()] * len(names)
        assert {(vm.power, vm.is_changing) for vm in (await vms(hypervisor)).values()} == {(Power.ON, True)}
    await until(hypervisor, lambda found: all(vm.power is Power.SUSPENDED for vm in found.values()))


def test_no_connection_is_used_by_two_at_once(server: Server) -> None:
    from gpuvirt_schedules.hypervisors.libvirt.session import LibvirtSession  # noqa: PLC0415  loads libvirt

    given = server.credentials
    session = LibvirtSession(given.server, given.ca, given.certificate, given.key)
    one, another = session.run(lambda first: (first, session.run(lambda second: second)))
    assert one is not another
    assert session.run(lambda again: again) in {one, another}, "they are kept"


async def test_a_save_goes_on_without_its_client(server: Server, hypervisor: ChildHypervisor) -> None:
    await hypervisor.call(Call(VmProof(key(0)), Action.START))
    await until(hypervisor, lambda found: not found["worker0"].is_changing)
    with server.host.stopped("worker0"):
        assert await hypervisor.call(Call(VmProof(key(0)), Action.SUSPEND)) == Accepted()
        await hypervisor.close()
    async with libvirt_connected(server.credentials) as another:
        await until(another, lambda found: found["worker0"].power is Power.SUSPENDED)


async def test_a_save_that_fails_after_it_was_accepted_is_reported_by_the_next_one(
    server: Server, hypervisor: ChildHypervisor
) -> None:
    """As on a host whose disk is full after most of the memory was written."""
    await hypervisor.call(Call(VmProof(key(0)), Action.START))
    await until(hypervisor, lambda found: not found["worker0"].is_changing)
    with server.host.without_disk_space(), server.host.stopped("worker0"):
        assert await hypervisor.call(Call(VmProof(key(0)), Action.SUSPEND)) == Accepted()
        server.host.signal("worker0", signal.SIGCONT)
        await until(hypervisor, lambda found: not found["worker0"].is_changing)
    assert (await vms(hypervisor))["worker0"].power is Power.ON
    refused = await hypervisor.call(Call(VmProof(key(0)), Action.SUSPEND))
    assert isinstance(refused, Refused), "this one was not made"
    assert refused.code == "HypervisorCallFailed"
    assert "No space left on device" in refused.text
    assert await hypervisor.call(Call(VmProof(key(0)), Action.SUSPEND)) == Accepted()
    await until(hypervisor, lambda found: found["worker0"].power is Power.SUSPENDED)


async def test_another_client_sees_that_a_vm_is_being_saved(server: Server, hypervisor: ChildHypervisor) -> None:
    await hypervisor.call(Call(VmProof(key(0)), Action.START))
    async with libvirt_connected(server.credentials) as another:
        await until(another, lambda found: not found["worker0"].is_changing)
        with server.host.stopped("worker0"):
            assert await hypervisor.call(Call(VmProof(key(0)), Action.SUSPEND)) == Accepted()
            found = (await vms(another))["worker0"]
            assert (found.power, found.is_changing) == (Power.ON, True)


async def test_a_guest_that_does_not_shut_down_stays_on(hypervisor: ChildHypervisor) -> None:
    await hypervisor.call(Call(VmProof(key(0)), Action.START))
    assert await hypervisor.call(Call(VmProof(key(0)), Action.SHUT_DOWN)) == Accepted()
    await CLOCK.sleep(0.5)
    found = (await vms(hypervisor))["worker0"]
    assert (found.power, found.is_changing) == (Power.ON, False)
    assert await hypervisor.call(Call(VmProof(key(0)), Action.POWER_OFF)) == Accepted()
    await until(hypervisor, lambda found: found["worker0"].power is Power.OFF)


async def test_a_vm_that_an_admin_has_paused_has_its_devices(server: Server, hypervisor: ChildHypervisor) -> None:
    server.host.virsh("start", "worker0")
    server.host.virsh("suspend", "worker0")
    found = (await vms(hypervisor))["worker0"]
    assert (found.power, found.is_changing) == (Power.ON, False)


@pytest.mark.parametrize(
    ("is_on", "action"),
    [(True, Action.START), (False, Action.SUSPEND), (False, Action.SHUT_DOWN), (False, Action.POWER_OFF)],
)
async def test_a_vm_in_another_state_refuses(
    server: Server, hypervisor: ChildHypervisor, action: Action, *, is_on: bool
) -> None:
    if is_on:
        server.host.virsh("start", "worker0")
    refused = await hypervisor.call(Call(VmProof(key(0)), action))
    assert isinstance(refused, Refused)
    assert refused.code == "WrongPowerState"
    assert f"the VM is {'on' if is_on else 'off'}" in refused.text


async def test_a_vm_that_does_not_exist_is_named(hypervisor: ChildHypervisor) -> None:
    for missing in ("00000000-0000-0000-0000-000000000000", "no UUID"):
        refused = await hypervisor.call(Call(VmProof(VmKey(missing)), Action.START))
        assert isinstance(refused, Refused)
        assert refused.code == ("VmNotFound" if missing.startswith("0") else "HypervisorRefused")
    unknown = await hypervisor.check([VmKey("no UUID")])
    assert isinstance(unknown, VmsUnknown), "libvirt alone says that a VM does not exist"


async def test_a_type_is_not_changed(hypervisor: ChildHypervisor) -> None:
    refused = await hypervisor.call(Call(VmProof(key(0)), Action.SET_VGPU_TYPE, "nvidia-63"))
    assert isinstance(refused, Refused)
    assert refused.code == "HypervisorRefused"
    assert "mediated device" in refused.text


async def test_a_vm_whose_vgpu_is_missing_does_not_start(server: Server, hypervisor: ChildHypervisor) -> None:
    server.host.define("worker9", uuid(9), MDEV)
    assert (await vms(hypervisor))["worker9"].vgpu_types == ("",), "its type is not in the VM's definition"
    answer = await hypervisor.call(Call(VmProof(key(9)), Action.START))
    assert isinstance(answer, Refused | OutcomeUnknown)
    assert "ediated" in answer.text
    assert (await vms(hypervisor))["worker9"].power is Power.OFF
    found = await hypervisor.check([key(9)])
    assert not isinstance(found, VmsUnknown)
    assert (found[key(9)].start.is_possible, found[key(9)].start.code) == (None, "VgpuTypeNotOffered")
    assert found[key(9)].suspend.is_possible is None


async def test_what_can_be_done_is_known_of_a_vm_that_runs(server: Server, hypervisor: ChildHypervisor) -> None:
    server.host.define("blocked", uuid(8), "", *BLOCKS)
    for name in ("worker0", "blocked"):
        server.host.virsh("start", name)
    found = await hypervisor.check([key(0), key(1), key(8), VmKey("00000000-0000-0000-0000-000000000000")])
    assert not isinstance(found, VmsUnknown)
    assert [*found] == [key(0), key(1), key(8)]
    running, off, blocked = found.values()
    assert running.suspend.is_possible is True
    assert (running.shut_down.is_possible, running.shut_down.code) == (None, "GuestToolsMissing")
    assert running.set_vgpu_type.is_possible is False
    assert (off.suspend.is_possible, off.suspend.code) == (None, "SuspendNotSupported")
    assert (blocked.suspend.is_possible, blocked.suspend.code) == (False, "SuspendNotSupported")
    assert "QEMU: " in blocked.suspend.text
    refused = await hypervisor.call(Call(VmProof(key(8)), Action.SUSPEND))
    assert isinstance(refused, Refused), "and libvirt decides by the same"
    assert refused.code == "HypervisorRefused"
    assert (await vms(hypervisor))["blocked"].power is Power.ON
