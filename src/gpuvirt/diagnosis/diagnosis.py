"""All checks, in order from the firmware to the VM, and the report of their findings."""

from collections.abc import Callable, Iterable

import msgspec

from gpuvirt.diagnosis.checks import devices, drivers, firmware, iommu, kata, kubelet, kubevirt, runtime
from gpuvirt.diagnosis.evidence import Evidence
from gpuvirt.diagnosis.findings import Area, CheckResult, Finding, Report, worst


class Check(msgspec.Struct, frozen=True):
    """One check."""

    area: Area
    run: Callable[[Evidence], Iterable[Finding]]
    for_vms: bool = False
    """Whether the check matters only for VMs, so that it is skipped where all GPUs are for containers."""

    @property
    def name(self) -> str:
        """The name of the check."""
        return self.run.__name__

    def findings(self, evidence: Evidence) -> tuple[Finding, ...]:
        """Return the findings."""
        return () if self.for_vms and evidence.serves_containers_only else tuple(self.run(evidence))


CHECKS: tuple[Check, ...] = (
    Check(Area.FIRMWARE, firmware.virtualization, for_vms=True),
    Check(Area.FIRMWARE, firmware.nested_host, for_vms=True),
    Check(Area.FIRMWARE, firmware.kvm, for_vms=True),
    Check(Area.FIRMWARE, firmware.bars),
    Check(Area.IOMMU, iommu.iommu),
    Check(Area.IOMMU, iommu.kernel_arguments),
    Check(Area.IOMMU, iommu.interrupt_remapping, for_vms=True),
    Check(Area.IOMMU, iommu.shared_groups, for_vms=True),
    Check(Area.DRIVERS, drivers.vfio_modules, for_vms=True),
    Check(Area.DRIVERS, drivers.grace_driver, for_vms=True),
    Check(Area.DRIVERS, drivers.modprobe_rules),
    Check(Area.DRIVERS, drivers.group_viability),
    Check(Area.DRIVERS, drivers.fighting_drivers),
    Check(Area.DRIVERS, drivers.host_driver),
    Check(Area.DRIVERS, drivers.boot_console, for_vms=True),
    Check(Area.DRIVERS, drivers.reset_methods, for_vms=True),
    Check(Area.DEVICES, devices.devices),
    Check(Area.VGPU, devices.vgpus, for_vms=True),
    Check(Area.VGPU, devices.vgpu_manager, for_vms=True),
    Check(Area.VGPU, devices.sriov, for_vms=True),
    Check(Area.KUBELET, kubelet.listening),
    Check(Area.KUBELET, kubelet.registration),
    Check(Area.KUBELET, kubelet.exclusion),
    Check(Area.KUBELET, kubelet.counted),
    Check(Area.KUBELET, kubelet.policies),
    Check(Area.KUBELET, kubelet.vms_near_gpus, for_vms=True),
    Check(Area.RUNTIME, runtime.container_cdi),
    Check(Area.RUNTIME, runtime.share_limits),
    Check(Area.RUNTIME, kata.kata_cdi_specs),
    Check(Area.RUNTIME, kata.kata_settings, for_vms=True),
    Check(Area.RUNTIME, kata.kata_handler, for_vms=True),
    Check(Area.RUNTIME, kata.kata_devices, for_vms=True),
    Check(Area.RUNTIME, kata.kata_nodes, for_vms=True),
    Check(Area.KUBEVIRT, kubevirt.permitted_names),
    Check(Area.KUBEVIRT, kubevirt.near_misses),
    Check(Area.KUBEVIRT, kubevirt.mediated_devices),
    Check(Area.KUBEVIRT, kubevirt.feature_gates),
    Check(Area.KUBEVIRT, kubevirt.iommufd),
)


def report(evidence: Evidence) -> Report:
    """Return the findings of all checks."""
    results = tuple(CheckResult(check.area, check.name, check.findings(evidence)) for check in CHECKS)
    return Report(worst(finding for result in results for finding in result.findings), results)
