"""The commands and lines that change the kernel's arguments, for the boot loader of the host."""

from enum import StrEnum

from gpuvirt.facts.setup import KernelSetup
from gpuvirt.model.inventory import osrelease


class BootLoader(StrEnum):
    """The program whose configuration has the kernel's command line."""

    TALOS = "Talos"
    OSTREE = "rpm-ostree"
    PROXMOX = "Proxmox"
    BLS = "BLS"
    GRUB = "GRUB"
    SYSTEMD_BOOT = "systemd-boot"
    UNKNOWN = "unknown"


def boot_loader(setup: KernelSetup) -> BootLoader:
    """Return the boot loader by the files of the host; the most specific one wins."""
    files = _boot_files(setup)
    grubby = bool(files & {"/usr/sbin/grubby", "/usr/bin/grubby"})
    kept: tuple[tuple[BootLoader, bool], ...] = (
        (BootLoader.TALOS, osrelease.parse(setup.os_release.text or "").id == "talos"),
        (BootLoader.OSTREE, {"/run/ostree-booted", "/usr/bin/rpm-ostree"} <= files),
        (BootLoader.PROXMOX, {"/etc/kernel/proxmox-boot-uuids", "/etc/kernel/cmdline"} <= files),
        (BootLoader.BLS, grubby),
        (BootLoader.GRUB, "/etc/default/grub" in files),
        (BootLoader.SYSTEMD_BOOT, any(path.endswith("/loader/entries") for path in files)),
    )
    return next((loader for loader, found in kept if found), BootLoader.UNKNOWN)


def _boot_files(setup: KernelSetup) -> set[str]:
    return {presence.path for presence in setup.boot_files if presence.exists is True}


def set_arguments(setup: KernelSetup, *arguments: str) -> tuple[str, ...]:
    """Return the steps that add arguments to the kernel's command line from the next boot on."""
    together = " ".join(arguments)
    lines: tuple[str, ...]
    files = _boot_files(setup)
    match boot_loader(setup):
        case BootLoader.TALOS:
            lines = (
                "# in the machine configuration (talosctl edit machineconfig), then talosctl upgrade",
                "machine: {install: {extraKernelArgs: [%s]}}" % ", ".join(arguments),  # noqa: UP031  braces
            )
        case BootLoader.OSTREE:
            lines = ("rpm-ostree kargs " + " ".join(f"--append-if-missing={argument}" for argument in arguments),)
        case BootLoader.PROXMOX:
            lines = (f"sed -i '1s|$| {together}|' /etc/kernel/cmdline", "proxmox-boot-tool refresh")
        case BootLoader.BLS:
            lines = (f'grubby --update-kernel=ALL --args="{together}"',)
        case BootLoader.GRUB:
            config = "/boot/grub2/grub.cfg" if "/boot/grub2/grub.cfg" in files else "/boot/grub/grub.cfg"
            make = "update-grub" if "/usr/sbin/update-grub" in files else f"grub2-mkconfig -o {config}"
            lines = (f"# in /etc/default/grub: add {together} to GRUB_CMDLINE_LINUX", make)
        case BootLoader.SYSTEMD_BOOT:
            lines = _systemd_boot(files, together)
        case _:
            lines = (f"# add {together} to the kernel's command line in this host's boot loader",)
    return (*lines, "reboot")


def drop_arguments(setup: KernelSetup, *arguments: str) -> tuple[str, ...]:
    """Return the steps that remove arguments from the kernel's command line."""
    together = " ".join(arguments)
    lines: tuple[str, ...]
    match boot_loader(setup):
        case BootLoader.TALOS:
            lines = (f"# remove {together} from machine.install.extraKernelArgs, then talosctl upgrade",)
        case BootLoader.OSTREE:
            lines = ("rpm-ostree kargs " + " ".join(f"--delete-if-present={argument}" for argument in arguments),)
        case BootLoader.PROXMOX:
            lines = (f"# remove {together} from /etc/kernel/cmdline", "proxmox-boot-tool refresh")
        case BootLoader.BLS:
            lines = (f'grubby --update-kernel=ALL --remove-args="{together}"',)
        case BootLoader.GRUB:
            make = set_arguments(setup)[1]
            lines = (f"# in /etc/default/grub: remove {together} from GRUB_CMDLINE_LINUX and ..._DEFAULT", make)
        case BootLoader.SYSTEMD_BOOT:
            lines = (f"# remove {together} from the options of the boot entry and from /etc/kernel/cmdline",)
        case _:
            lines = (f"# remove {together} from the kernel's command line in this host's boot loader",)
    return (*lines, "reboot")


def remake_initramfs(setup: KernelSetup) -> str:
    """Return the command that rebuilds the initramfs of the host."""
    files = _boot_files(setup)
    if "/usr/sbin/update-initramfs" in files:
        return "update-initramfs -u -k all"
    return "dracut --force --regenerate-all" if "/usr/bin/dracut" in files else "# rebuild the initramfs"


def _systemd_boot(files: set[str], together: str) -> tuple[str, ...]:
    if "/etc/kernel/cmdline" in files:
        return (f"sed -i '1s|$| {together}|' /etc/kernel/cmdline", 'kernel-install add "$(uname -r)" /boot/vmlinuz')
    entries = next(path for path in sorted(files) if path.endswith("/loader/entries"))
    return (f"sed -i '/^options/s|$| {together}|' {entries}/*.conf",)
