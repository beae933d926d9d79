"""The values that are read of XML as libvirt documents it, and the meaning of each error for a call."""

import errno
import tempfile
from importlib.util import find_spec
from types import SimpleNamespace
from typing import cast

import pytest
from typing_extensions import override

from gpuvirt_schedules.hypervisors.messages import BackEndError, Problem

if find_spec("libvirt") is None:
    pytest.skip("no libvirt-python", allow_module_level=True)

import libvirt

from gpuvirt_schedules.hypervisors.libvirt.backend import (
    Running,
    VmDevices,
    devices_of,
    mdev_type,
    never_suspended,
    read,
    start,
)
from gpuvirt_schedules.hypervisors.libvirt.session import FAULTS, LibvirtSession, problem_of

pytestmark = pytest.mark.ring("libvirt")
UUID = "c2177883-f1bb-47f0-914d-32a22e3a8804"
VM = f"""
<domain type='kvm'><devices>
  <hostdev mode='subsystem' type='mdev' managed='no' model='vfio-pci' display='off'>
    <source><address uuid='{UUID.upper()}'/></source>
  </hostdev>
  <hostdev mode='subsystem' type='pci' managed='yes'>
    <source><address domain='0x0000' bus='0x65' slot='0x00' function='0x4'/></source>
  </hostdev>
  <hostdev mode='subsystem' type='usb'><source><vendor id='0x1234'/><product id='0xbeef'/></source></hostdev>
  <channel type='unix'>
    <target type='virtio' name='org.qemu.guest_agent.0' state='%s'/>
  </channel>
</devices></domain>
"""
MDEV = f"<device><capability type='mdev'><type id='nvidia-63'/><uuid>{UUID}</uuid></capability></device>"
DEVICES = VmDevices((UUID,), 1, is_agent_connected=True)
BEFORE, SINCE = 8_005_000, 8_006_000


def test_the_devices_of_a_vm() -> None:
    assert devices_of(VM % "connected") == DEVICES
    assert not devices_of(VM % "disconnected").is_agent_connected
    assert devices_of("<domain><devices/></domain>") == VmDevices((), 0, is_agent_connected=False)


@pytest.mark.parametrize("text", ["", "<domain>", "domain"])
def test_a_vm_that_can_not_be_read_makes_the_reading_unknown(text: str) -> None:
    with pytest.raises(BackEndError) as raised:
        devices_of(text)
    assert raised.value.problem is Problem.INCOMPLETE


@pytest.mark.parametrize("uuid", [f"<uuid>{UUID}</uuid>", ""])
@pytest.mark.parametrize("parent", ["_0000_06_00_0", ""])
def test_the_type_of_a_mediated_device(uuid: str, parent: str) -> None:
    text = f"""
    <device><name>mdev_{UUID.replace("-", "_")}{parent}</name><parent>pci_0000_06_00_0</parent>
      <capability type='mdev'><type id='nvidia-63'/>{uuid}<iommuGroup number='12'/></capability>
    </device>
    """
    assert mdev_type(text) == (UUID, "nvidia-63")


@pytest.mark.parametrize("devices", [VmDevices((UUID,), 0, is_agent_connected=False), DEVICES])
def test_an_old_libvirt_saves_no_vm_with_a_device_of_its_host(devices: VmDevices) -> None:
    refused = never_suspended(devices, BEFORE, is_persistent=True)
    assert refused is not None
    assert (refused.is_possible, refused.code) == (False, Problem.NO_SUSPEND)
    assert "libvirt 8.5" in refused.text
    assert never_suspended(devices, SINCE, is_persistent=True) is None
    assert never_suspended(VmDevices((), 0, is_agent_connected=False), BEFORE, is_persistent=True) is None


def test_a_vm_that_libvirt_forgets_is_never_saved() -> None:
    refused = never_suspended(DEVICES, SINCE, is_persistent=False)
    assert refused is not None
    assert refused.is_possible is False


def test_a_vgpu_that_its_host_does_not_show_is_not_proven() -> None:
    assert start(DEVICES, {UUID: "nvidia-63"}).is_possible is True
    assert start(DEVICES, {}).is_possible is None
    assert start(DEVICES, None).is_possible is None, "the host's devices could not be read"


def error(code: int) -> libvirt.libvirtError:
    """Return an error with a code."""

    class Coded(libvirt.libvirtError):
        @override
        def get_error_code(self) -> int:
            return code

        @override
        def get_error_message(self) -> str:
            return "words"

    return Coded("words")


@pytest.mark.parametrize(("code", "problem"), FAULTS.items())
def test_a_refusal_is_certain(code: int, problem: Problem) -> None:
    found = problem_of(error(code), is_certain=False)
    assert (found.problem, found.is_certain) == (problem, True)


@pytest.mark.parametrize("code", set(range(110)) - set(FAULTS))
def test_any_other_error_of_a_call_is_not(code: int) -> None:
    assert not problem_of(error(code), is_certain=False).is_certain


def test_nothing_is_certain_after_a_connection_has_ended() -> None:
    found = problem_of(error(libvirt.VIR_ERR_OPERATION_INVALID), is_certain=False, is_alive=False)
    assert (found.problem, found.is_certain) == (Problem.UNREACHABLE, False)


def raising(found: Exception) -> object:
    """Return a function that always fails."""

    def fail(*_: object, **__: object) -> None:
        raise found

    return fail


def host(**functions: object) -> libvirt.virConnect:
    """Return a connection to a host with a vGPU and a VM that runs; the VM's functions may be other ones."""
    running: dict[str, object] = {
        "XMLDesc": lambda _: VM % "connected",
        "UUIDString": lambda: "5017bbbb-0000-4000-8000-000000000000",
        "controlInfo": lambda: [libvirt.VIR_DOMAIN_CONTROL_OK],
        "isActive": lambda: 1,
        "jobInfo": lambda: [libvirt.VIR_DOMAIN_JOB_NONE],
        "name": lambda: "worker0",
        "state": lambda: [libvirt.VIR_DOMAIN_NOSTATE, 0],
    }
    found = SimpleNamespace(
        listAllDevices=lambda _: [SimpleNamespace(XMLDesc=lambda _: MDEV)],
        listAllDomains=lambda _: [SimpleNamespace(**(running | functions))],
    )
    return cast("libvirt.virConnect", found)


def test_the_type_of_a_vgpu_is_that_of_the_hosts_mediated_device() -> None:
    (vm,) = read(host(), Running())
    assert (vm.vgpu_types, vm.is_changing) == (("nvidia-63",), False)


@pytest.mark.parametrize("function", ["XMLDesc", "controlInfo"])
def test_only_a_vm_that_libvirt_does_not_know_is_left_out(function: str) -> None:
    assert read(host(**{function: raising(error(libvirt.VIR_ERR_NO_DOMAIN))}), Running()) == []


def test_a_vm_whose_definition_can_not_be_asked_for_makes_the_reading_unknown() -> None:
    with pytest.raises(libvirt.libvirtError):
        read(host(XMLDesc=raising(error(libvirt.VIR_ERR_OPERATION_INVALID))), Running())


def test_a_vm_that_does_not_answer_may_be_changing() -> None:
    (vm,) = read(host(controlInfo=raising(error(libvirt.VIR_ERR_OPERATION_INVALID))), Running())
    assert vm.is_changing


def test_a_client_without_a_file_for_its_key_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", raising(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(BackEndError, match="No space left on device") as raised:
        LibvirtSession("127.0.0.1", "CA", "certificate", "key").opened()
    assert (raised.value.problem, raised.value.is_certain) == (Problem.FAILED, True)


def test_a_certificate_that_was_refused_is_not_shown_again(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[object]()

    def refuse(uri: str) -> None:
        opened.append(uri)
        raise libvirt.libvirtError("authentication failed: No authentication")

    monkeypatch.setattr(libvirt, "open", refuse)
    session = LibvirtSession("127.0.0.1", "CA", "certificate", "key")
    for _ in range(2):
        with pytest.raises(BackEndError) as raised:
            session.opened()
        assert raised.value.problem is Problem.WRONG_CREDENTIALS
    assert len(opened) == 1
