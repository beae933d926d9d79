"""How this host's kernel gets an argument: the lines for the boot loader that lies on it."""

from enum import StrEnum

from gpuvirt.facts.setup import Setup
from gpuvirt.model.inventory import osrelease


class BootLoader(StrEnum):
    """What keeps the kernel's command line."""

    TALOS = "Talos"
    OSTREE = "rpm-ostree"
    PROXMOX = "Proxmox"
    BLS = "BLS"
    GRUB = "GRUB"
    SYSTEMD_BOOT = "systemd-boot"
    UNKNOWN = "unknown"


def boot_loader(setup: Setup) -> BootLoader:
    """Return what keeps a host's command line, by what lies on it; the more special first."""
    there: set[str] = {presence.path for presence in setup.boot_files if presence.there is True}
    grubby = bool(there & {"/usr/sbin/grubby", "/usr/bin/grubby"})
    kept: tuple[tuple[BootLoader, bool], ...] = (
        (BootLoader.TALOS, _os(setup) == "talos"),
        (BootLoader.OSTREE, {"/run/ostree-booted", "/usr/bin/rpm-ostree"} <= there),
        (BootLoader.PROXMOX, {"/etc/kernel/proxmox-boot-uuids", "/etc/kernel/cmdline"} <= there),
        (BootLoader.BLS, grubby),
        (BootLoader.GRUB, "/etc/default/grub" in there),
        (BootLoader.SYSTEMD_BOOT, any(path.endswith("/loader/entries") for path in there)),
    )
    return next((loader for loader, found in kept if found), BootLoader.UNKNOWN)


def set_arguments(setup: Setup, *arguments: str) -> tuple[str, ...]:
    """Return what to do so that the kernel gets arguments from its next boot on."""
    together = " ".join(arguments)
    lines: tuple[str, ...]
    there: set[str] = {presence.path for presence in setup.boot_files if presence.there is True}
    match boot_loader(setup):
        case BootLoader.TALOS:
            lines = (
                "# in the machine configuration (talosctl edit machineconfig), then talosctl upgrade",
                "machine: {install: {extraKernelArgs: [%s]}}" % ", ".join(arguments),  # noqa: UP031  braces
            )
        case BootLoader.OSTREE:
            lines = ("rpm-ostree kargs " + " ".join(f"--append-if-missing={one}" for one in arguments),)
        case BootLoader.PROXMOX:
            lines = (f"sed -i '1s|$| {together}|' /etc/kernel/cmdline", "proxmox-boot-tool refresh")
        case BootLoader.BLS:
            lines = (f'grubby --update-kernel=ALL --args="{together}"',)
        case BootLoader.GRUB:
            config = "/boot/grub2/grub.cfg" if "/boot/grub2/grub.cfg" in there else "/boot/grub/grub.cfg"
            make = "update-grub" if "/usr/sbin/update-grub" in there else f"grub2-mkconfig -o {config}"
            lines = (f"# in /etc/default/grub: add {together} to GRUB_CMDLINE_LINUX", make)
        case BootLoader.SYSTEMD_BOOT:
            lines = _systemd_boot(there, together)
        case _:
            lines = (f"# give the kernel {together}, in the way of this host's boot loader",)
    return (*lines, "reboot")


def drop_arguments(setup: Setup, *arguments: str) -> tuple[str, ...]:
    """Return what to do so that the kernel gets arguments no more."""
    together = " ".join(arguments)
    lines: tuple[str, ...]
    match boot_loader(setup):
        case BootLoader.TALOS:
            lines = (f"# take {together} out of machine.install.extraKernelArgs, then talosctl upgrade",)
        case BootLoader.OSTREE:
            lines = ("rpm-ostree kargs " + " ".join(f"--delete-if-present={one}" for one in arguments),)
        case BootLoader.PROXMOX:
            lines = (f"# take {together} out of /etc/kernel/cmdline", "proxmox-boot-tool refresh")
        case BootLoader.BLS:
            lines = (f'grubby --update-kernel=ALL --remove-args="{together}"',)
        case BootLoader.GRUB:
            make = set_arguments(setup)[1]
            lines = (f"# in /etc/default/grub: take {together} out of GRUB_CMDLINE_LINUX and ..._DEFAULT", make)
        case BootLoader.SYSTEMD_BOOT:
            lines = (f"# take {together} out of the options of the boot entry, and out of /etc/kernel/cmdline",)
        case _:
            lines = (f"# take {together} from the kernel's command line, in the way of this host's boot loader",)
    return (*lines, "reboot")


def remake_initramfs(setup: Setup) -> str:
    """Return how this host's initial file system is made again."""
    there: set[str] = {presence.path for presence in setup.boot_files if presence.there is True}
    if "/usr/sbin/update-initramfs" in there:
        return "update-initramfs -u -k all"
    return "dracut --force --regenerate-all" if "/usr/bin/dracut" in there else "# make the initramfs again"


def _systemd_boot(there: set[str], together: str) -> tuple[str, ...]:
    if "/etc/kernel/cmdline" in there:
        return (f"sed -i '1s|$| {together}|' /etc/kernel/cmdline", 'kernel-install add "$(uname -r)" /boot/vmlinuz')
    entries = next(path for path in sorted(there) if path.endswith("/loader/entries"))
    return (f"sed -i '/^options/s|$| {together}|' {entries}/*.conf",)


def _os(setup: Setup) -> str:
    return osrelease.parse(setup.os_release.text or "").id
