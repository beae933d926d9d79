"""Checks of drivers: VFIO's modules, how modules are loaded, who else has or holds a GPU, how it can be reset."""

import re
from collections.abc import Iterable, Iterator

from gpuvirt.facts.ids import PciId, parse_pci_id, slot_of
from gpuvirt.facts.pci import AMD, NVIDIA, PciFunction, Unread
from gpuvirt.facts.platform import Attribute, Listing
from gpuvirt.facts.sysfs import device_path
from gpuvirt.model.doctor.bootloader import drop_arguments, remake_initramfs, set_arguments
from gpuvirt.model.doctor.evidence import Evidence
from gpuvirt.model.doctor.findings import Finding, fine, problem, seen, unread
from gpuvirt.model.inventory.inventory import Gpu
from gpuvirt.model.inventory.isolation import spoilers
from gpuvirt.model.offers.resets import KEEPS_MEMORY, NO_WAY, is_reset
from gpuvirt.model.reasons import FindingCode, ReasonCode, Seen
from gpuvirt.model.reasons.codes import Level
from gpuvirt.paths import HostPath

SYSFB_INIT = (5, 15)
"""From this kernel on, the firmware's screen is handed on by `sysfb_init`, whatever driver shows it."""

FIRMWARE_SCREENS = ("EFI VGA", "VESA VGA", "simple", "simpledrm")
"""How names of framebuffers begin that draw into the memory of whatever GPU the firmware has chosen."""


def vfio_modules(evidence: Evidence) -> Iterator[Finding]:
    """VFIO's modules are there."""
    setup = evidence.setup
    running = {*setup.modules.known, *setup.builtin_modules.known}
    needed = ["vfio_pci"]
    if not evidence.inventory.facts.platform.iommufd:
        needed.append("vfio_iommu_type1")
    lists = (setup.modules, setup.builtin_modules, setup.available_modules)
    missing = [name for name in needed if name not in running]
    loadable = [name for name in missing if name in setup.available_modules.known]
    if evidence.on_vfio or not missing:
        told = ", ".join(f"{one.path.rpartition('/')[2]}={one.shown}" for one in setup.vfio_parameters if one.text)
        shown = Listing(setup.modules.path, tuple(name for name in needed if name in setup.modules.known))
        yield fine("VFIO's modules", f"are loaded{f' ({told})' if told else ''}", shown)
    elif loadable == missing:
        shown = Listing(setup.available_modules.path, tuple(loadable))
        yield fine("VFIO's modules", "are not loaded, and can be: modprobe vfio-pci", shown)
    elif any(isinstance(one.names, Unread) for one in lists) or setup.available_modules.names is None:
        yield unread("VFIO's modules", "are not loaded; whether they could be can't be told", *lists)
    else:
        yield problem(
            FindingCode.VFIO_MISSING,
            ", ".join(one for one in missing if one not in loadable),
            "is not in this kernel",
            seen(Listing(setup.available_modules.path, ()), setup.release),
            why="no driver can hand a GPU to a machine",
            fix=(
                f"install the kernel's further modules (Debian, Ubuntu: linux-modules-extra-{setup.release.text})",
                "or boot a kernel with CONFIG_VFIO_PCI and CONFIG_VFIO_IOMMU_TYPE1",
            ),
        )


def modprobe_rules(evidence: Evidence) -> Iterator[Finding]:
    """Nothing keeps VFIO's modules from being loaded, and they get the devices that they are told to take."""
    setup = evidence.setup
    for folder in setup.modprobe_folders:
        if isinstance(folder.names, Unread):
            yield unread("how modules are loaded", "could not be read", folder)
    for file in setup.modprobe:
        if isinstance(file.value, Unread):
            yield unread("how modules are loaded", "could not be read", file)
    rules = list(_rules(evidence))
    for where, words in rules:
        if words[0] == "install" and _module(words[1]).startswith("vfio") and re.search(r"/(false|true)$", words[2]):
            yield _blocked(where, " ".join(words), (f"take the line out of {where}",))
    banned = evidence.argument("module_blacklist") or ""
    if any(_module(one).startswith("vfio") for one in banned.split(",")):
        argument = f"module_blacklist={banned}"
        yield _blocked(setup.cmdline.path, argument, drop_arguments(setup, argument))
    for where, text, desired in _ids(evidence, rules):
        yield from _not_bound(evidence, where, text, desired)


def _rules(evidence: Evidence) -> Iterator[tuple[HostPath, list[str]]]:
    """Yield the lines of modprobe's files that have three words or more, as modprobe.d(5) has them."""
    for file in evidence.setup.modprobe:
        for line in (file.text or "").replace("\\\n", " ").splitlines():
            words = line.split()
            if len(words) >= 3 and not words[0].startswith("#"):
                yield file.path, words


def _module(name: str) -> str:
    return name.replace("-", "_")


def _blocked(where: str, line: str, fix: tuple[str, ...]) -> Finding:
    return problem(
        FindingCode.VFIO_BLOCKED,
        "VFIO's modules",
        "are kept from being loaded",
        (Seen(where, line[:200]),),
        why="no driver can hand a GPU to a machine",
        fix=fix,
    )


def _ids(evidence: Evidence, rules: Iterable[tuple[HostPath, list[str]]]) -> Iterator[tuple[HostPath, str, set[PciId]]]:
    """Yield the ids that vfio-pci is told to take, with where that stands."""
    for where, words in rules:
        if words[0] == "options" and _module(words[1]) == "vfio_pci":
            for word in words[2:]:
                if word.startswith("ids="):
                    yield where, word, parse_ids(word.removeprefix("ids="))
    for name in ("vfio-pci.ids", "vfio_pci.ids"):
        if value := evidence.argument(name):
            yield evidence.setup.cmdline.path, f"{name}={value}", parse_ids(value)


def parse_ids(text: str) -> set[PciId]:
    """Return the devices in vfio-pci's `ids=`, each `vendor:device[:...]`; what is none is passed over, as by it."""
    found: set[PciId] = set()
    for one in text.strip('"').split(","):
        parts = one.split(":")
        try:
            found.add(parse_pci_id(":".join(part.zfill(4) for part in parts[:2])))
        except ValueError:
            continue
    return found


def _not_bound(evidence: Evidence, where: str, text: str, desired: set[PciId]) -> Iterator[Finding]:
    facts = evidence.inventory.facts
    stray = [
        one
        for one in facts.functions.values()
        if one.id in desired and not one.on_vfio and isinstance(one.driver, str) and one.iommu_group is not None
    ]
    if not stray:
        return
    drivers = sorted({str(one.driver) for one in stray})
    yield problem(
        FindingCode.IDS_NOT_BOUND,
        ", ".join(one.address for one in stray),
        f"should be vfio-pci's by its id, and {', '.join(drivers)} was faster",
        (
            Seen(where, text[:200]),
            *(Seen(device_path(one.address, "driver"), str(one.driver)) for one in stray),
        ),
        why="the driver that is loaded first takes a device; ids= counts for what is free then",
        fix=(
            *(f"echo 'softdep {driver} pre: vfio-pci' >> /etc/modprobe.d/vfio.conf" for driver in drivers),
            remake_initramfs(evidence.setup),
            "reboot",
        ),
    )


def group_viability(evidence: Evidence) -> Iterator[Finding]:
    """No driver of the host has a function beside a GPU that is to be handed on."""
    told = 0
    for gpu in evidence.on_vfio:
        group = gpu.function.iommu_group
        members = evidence.inventory.groups.get(group, ()) if isinstance(group, int) else ()
        spoiling = spoilers(evidence.inventory.facts.functions, (one for one in members if one != gpu.function.address))
        if spoiling:
            told += 1
            yield not_viable(gpu, spoiling)
    if evidence.on_vfio and not told:
        yield fine(f"{len(evidence.on_vfio)} GPUs on a VFIO driver", "have no neighbour that the host uses")


def not_viable(gpu: Gpu, spoiling: tuple[PciFunction, ...]) -> Finding:
    """Return that some functions keep a GPU's group from being opened."""
    own = [one for one in spoiling if slot_of(one.address) == slot_of(gpu.function.address)]
    foreign = [one for one in spoiling if one not in own]
    named = ", ".join(f"{one.address} ({one.kind}, {one.driver})" for one in spoiling)
    # A GPU moves with all functions of its slot.
    lines = [f"gpuvirt vfio bind {gpu.function.address}"] if own else []
    if foreign:
        where = ", ".join(one.address for one in foreign)
        lines += [f"put the GPU into another slot, as {where} is no part of its card and the host may need it"]
    return Finding(
        Level.ERROR,
        gpu.function.address,
        f"can't be opened while {named} of IOMMU group {gpu.function.iommu_group} is used by the host",
        ReasonCode.GROUP_NOT_VIABLE,
        tuple(Seen(device_path(one.address, "driver"), str(one.driver)) for one in spoiling),
        why="the kernel opens a group when no driver of the host has any of it; the machine does not start",
        fix=tuple(lines),
    )


def fighting_drivers(evidence: Evidence) -> Iterator[Finding]:
    """nouveau leaves NVIDIA's GPUs to others."""
    gpus = [gpu.function for gpu in evidence.inventory.gpus.values() if gpu.function.id.vendor == NVIDIA]
    taken = [one for one in gpus if one.driver == "nouveau"]
    both = {"nouveau", "nvidia"} <= set(evidence.setup.modules.known)
    if not taken and not both:
        if gpus:
            yield fine("nouveau", "has none of NVIDIA's GPUs")
        return
    message = f"has {', '.join(one.address for one in taken)}" if taken else "is loaded beside nvidia"
    shown = tuple(Seen(f"/sys/bus/pci/devices/{one.address}/driver", "nouveau") for one in taken)
    yield problem(
        FindingCode.DRIVERS_FIGHT,
        "nouveau",
        message,
        shown or (Seen(evidence.setup.modules.path, "nouveau nvidia"),),
        why="which of them gets a GPU changes by boot; unbinding one that nouveau shows a console on can hang",
        fix=(
            "printf 'blacklist nouveau\\noptions nouveau modeset=0\\n' > /etc/modprobe.d/nouveau.conf",
            remake_initramfs(evidence.setup),
            "reboot",
        ),
    )


def boot_console(evidence: Evidence) -> Iterator[Finding]:
    """The host's screen is on none of the GPUs that are to be handed on."""
    framebuffers = evidence.setup.framebuffers
    screens = [one for one in framebuffers if one.name.text and one.name.text.startswith(FIRMWARE_SCREENS)]
    for gpu, setup in evidence.looked_at():
        if not gpu.function.on_vfio:
            continue
        if isinstance(setup.boot_vga.value, Unread):
            yield unread(gpu.function.address, "may be what the firmware shows its screen on", setup.boot_vga)
        own = [one for one in framebuffers if one.device.target == gpu.function.address]
        holding = own or (screens if setup.boot_vga.text == "1" else [])
        if holding:
            yield problem(
                FindingCode.BOOT_CONSOLE,
                gpu.function.address,
                f"is what the host shows its screen on ({holding[0].name.shown})",
                seen(setup.boot_vga, holding[0].name),
                why="the screen keeps the GPU's memory: machines fail with `BAR: can't reserve`",
                fix=(
                    "in the firmware's setup: make the onboard display the primary one",
                    "or keep the kernel from using the firmware's screen:",
                    *set_arguments(evidence.setup, _without_screen(evidence.setup.release)),
                ),
            )


def _without_screen(release: Attribute) -> str:
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", release.text or "")
    new = match is None or (int(match[1]), int(match[2])) >= SYSFB_INIT
    return "initcall_blacklist=sysfb_init" if new else "video=efifb:off"


def reset_methods(evidence: Evidence) -> Iterator[Finding]:
    """Every GPU that is handed on can be reset."""
    well: list[Attribute] = []
    for gpu, setup in evidence.looked_at():
        method = setup.reset_method
        if not gpu.function.on_vfio or method is None:
            continue
        if isinstance(method.value, Unread):
            yield unread(gpu.function.address, "can be reset or not: that could not be read", method)
        elif method.text or (method.value is None and setup.reset.there is True):
            well.append(method)
        elif method.value is None and isinstance(setup.reset.there, Unread):
            yield unread(gpu.function.address, "can be reset or not: that could not be read", setup.reset)
        elif is_reset(evidence.inventory.facts.functions, gpu.function.address, gpu.function.reset):
            well.append(method)
        else:
            yield Finding(
                Level.WARNING,
                gpu.function.address,
                NO_WAY,
                ReasonCode.NO_RESET,
                seen(method, setup.reset),
                why=KEEPS_MEMORY,
                fix=(
                    "install the module vendor-reset, if the card is older than RDNA 2"
                    if gpu.function.id.vendor == AMD
                    else "update the card's firmware, and the host's",
                    "until then reboot the host before it goes to another tenant",
                ),
            )
    if well:
        yield fine(f"{len(well)} GPUs on a VFIO driver", "can be reset", well[0])
