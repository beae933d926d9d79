"""All checks, in order from the firmware to the VM, and the report of their findings."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpuvirt.model.doctor.checks import devices, drivers, firmware, iommu, kubelet, kubevirt, runtime, vgpu
from gpuvirt.model.doctor.evidence import Evidence
from gpuvirt.model.doctor.findings import Area, Finding, Report, Result, worst


@dataclass(frozen=True, slots=True)
class Check:
    """One check."""

    area: Area
    run: Callable[[Evidence], Iterable[Finding]]

    @property
    def name(self) -> str:
        """The name of the check."""
        return self.run.__name__


CHECKS: tuple[Check, ...] = (
    Check(Area.FIRMWARE, firmware.virtualization),
    Check(Area.FIRMWARE, firmware.nested_host),
    Check(Area.FIRMWARE, firmware.kvm),
    Check(Area.FIRMWARE, firmware.bars),
    Check(Area.IOMMU, iommu.iommu),
    Check(Area.IOMMU, iommu.kernel_arguments),
    Check(Area.IOMMU, iommu.interrupt_remapping),
    Check(Area.IOMMU, iommu.shared_groups),
    Check(Area.DRIVERS, drivers.vfio_modules),
    Check(Area.DRIVERS, drivers.modprobe_rules),
    Check(Area.DRIVERS, drivers.group_viability),
    Check(Area.DRIVERS, drivers.fighting_drivers),
    Check(Area.DRIVERS, drivers.boot_console),
    Check(Area.DRIVERS, drivers.reset_methods),
    Check(Area.DEVICES, devices.devices),
    Check(Area.VGPU, vgpu.vgpus),
    Check(Area.VGPU, vgpu.vgpu_manager),
    Check(Area.VGPU, vgpu.sriov),
    Check(Area.KUBELET, kubelet.listening),
    Check(Area.KUBELET, kubelet.registration),
    Check(Area.KUBELET, kubelet.counted),
    Check(Area.KUBELET, kubelet.policies),
    Check(Area.KUBELET, kubelet.vms_near_gpus),
    Check(Area.RUNTIME, runtime.container_cdi),
    Check(Area.KUBEVIRT, kubevirt.permitted_names),
    Check(Area.KUBEVIRT, kubevirt.near_misses),
    Check(Area.KUBEVIRT, kubevirt.mediated_devices),
    Check(Area.KUBEVIRT, kubevirt.feature_gates),
)


def report(evidence: Evidence) -> Report:
    """Return the findings of all checks."""
    results = tuple(Result(check.area, check.name, tuple(check.run(evidence))) for check in CHECKS)
    return Report(worst(finding for result in results for finding in result.findings), results)
