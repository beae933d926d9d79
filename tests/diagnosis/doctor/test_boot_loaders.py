"""The exact commands that set a kernel argument, for the boot loader of the host."""

import pytest

from gpuvirt.diagnosis.bootloader import BootLoader, boot_loader, drop_arguments, set_arguments
from gpuvirt_sim.devices.platform import Boot, PlatformSpec
from tests.diagnosis.doctor.sickhost import evidence, host


@pytest.mark.parametrize(
    ("boot", "loader", "line"),
    [
        (Boot.GRUB, BootLoader.GRUB, "update-grub"),
        (Boot.GRUB2, BootLoader.GRUB, "grub2-mkconfig -o /boot/grub2/grub.cfg"),
        (Boot.BLS, BootLoader.BLS, 'grubby --update-kernel=ALL --args="intel_iommu=on iommu=pt"'),
        (Boot.TALOS, BootLoader.TALOS, "machine: {install: {extraKernelArgs: [intel_iommu=on, iommu=pt]}}"),
        (
            Boot.SYSTEMD_BOOT,
            BootLoader.SYSTEMD_BOOT,
            "sed -i '/^options/s|$| intel_iommu=on iommu=pt|' /boot/loader/entries/*.conf",
        ),
        (
            Boot.OSTREE,
            BootLoader.OSTREE,
            "rpm-ostree kargs --append-if-missing=intel_iommu=on --append-if-missing=iommu=pt",
        ),
        (Boot.PROXMOX, BootLoader.PROXMOX, "proxmox-boot-tool refresh"),
        (
            Boot.NONE,
            BootLoader.UNKNOWN,
            "# add intel_iommu=on iommu=pt to the kernel's command line in this host's boot loader",
        ),
    ],
)
def test_the_fix_matches_the_boot_loader_of_the_host(boot: Boot, loader: BootLoader, line: str) -> None:
    setup = evidence(host(PlatformSpec(boot=boot))).setup
    assert boot_loader(setup) is loader
    lines = set_arguments(setup, "intel_iommu=on", "iommu=pt")
    assert line in lines
    assert lines[-1] == "reboot"


@pytest.mark.parametrize("boot", Boot)
def test_the_fix_removes_a_kernel_argument(boot: Boot) -> None:
    lines = drop_arguments(evidence(host(PlatformSpec(boot=boot))).setup, "intel_iommu=off")
    assert "intel_iommu=off" in lines[0]
    assert lines[-1] == "reboot"
