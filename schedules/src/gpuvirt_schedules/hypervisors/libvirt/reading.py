"""All VMs of a host with libvirt."""

from collections.abc import Iterable, Mapping

import libvirt

from gpuvirt.model.workers.hypervisor import Power, VmKey, WorkerVm
from gpuvirt_schedules.hypervisors.libvirt.devices import devices_of, mdev_types
from gpuvirt_schedules.hypervisors.libvirt.running import Running

MOVING = frozenset({libvirt.VIR_DOMAIN_PAUSED_SAVE, libvirt.VIR_DOMAIN_PAUSED_STARTING_UP})
"""Why a VM is paused whose memory libvirt writes or reads. An admin's pause is no change: the VM keeps its devices."""


def read(connection: libvirt.virConnect, running: Running) -> list[WorkerVm]:
    """Return all VMs; raises BackEndError, and errors of libvirt."""
    types: Mapping[str, str] | None = None
    found = list[WorkerVm]()
    for domain in connection.listAllDomains(0):
        try:
            mdevs = devices_of(domain.XMLDesc(0)).mdevs
            if mdevs and types is None:
                types = mdev_types(connection) or {}
            found.append(_worker_vm(domain, mdevs, types or {}, running))
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
                raise
            # It was deleted, or it has ended and libvirt does not keep it: it does not exist.
    return found


def _worker_vm(domain: libvirt.virDomain, mdevs: Iterable[str], types: Mapping[str, str], running: Running) -> WorkerVm:
    key = VmKey(domain.UUIDString())
    # Before the state: a call that ends in between has then changed it.
    is_changing = running.has(key)
    power = power_of(domain)
    return WorkerVm(
        key=key,
        name=domain.name(),
        system_uuid=key.lower(),  # libvirt refuses a VM whose SMBIOS has another one
        power=power,
        vgpu_types=tuple(types.get(mdev, "") for mdev in mdevs),
        is_changing=is_changing or (power is Power.ON and is_moving(domain)),
    )


def power_of(domain: libvirt.virDomain) -> Power:
    """Return a VM's power. One that is paused, sleeps or has crashed while its QEMU lives has its devices: it is on."""
    if domain.isActive():
        return Power.ON
    return Power.SUSPENDED if domain.hasManagedSaveImage() else Power.OFF


def is_moving(domain: libvirt.virDomain) -> bool:
    """Return whether libvirt is saving, resuming, migrating or ending a VM that is on, by whatever client.

    None of these calls waits for QEMU, which answers nothing while it moves a vGPU's memory.
    """
    state, reason, *_ = domain.state()
    if state == libvirt.VIR_DOMAIN_SHUTDOWN or (state == libvirt.VIR_DOMAIN_PAUSED and reason in MOVING):
        return True
    try:
        if domain.controlInfo()[0] != libvirt.VIR_DOMAIN_CONTROL_OK:
            return True
        return domain.jobInfo()[0] != libvirt.VIR_DOMAIN_JOB_NONE
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            raise
        return True  # it has just ended, or is busy
