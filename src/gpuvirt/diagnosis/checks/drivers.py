"""Checks of drivers: VFIO's modules, modprobe's rules, drivers that compete for GPUs, the boot console, resets."""

import re
from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from gpuvirt.diagnosis.bootloader import drop_arguments, remake_initramfs, set_arguments
from gpuvirt.diagnosis.evidence import Evidence, kernel_series
from gpuvirt.diagnosis.findings import Finding, fine, of_reason, problem, seen, unread
from gpuvirt.facts.ids import PciId, parse_pci_id
from gpuvirt.facts.pci import GRACE_DRIVER, NVIDIA, PciFunction, Unread
from gpuvirt.facts.platform import Attribute, Listing
from gpuvirt.facts.setup import KernelSetup
from gpuvirt.facts.sysfs import device_path
from gpuvirt.model.inventory.inventory import Gpu
from gpuvirt.model.inventory.isolation import group_blockers
from gpuvirt.model.inventory.resets import Reset, reset_of
from gpuvirt.model.reasons import FindingCode, Reason, Seen, count_of, refusals
from gpuvirt.model.reasons.codes import Level
from gpuvirt.model.reasons.notoffered import KEEPS_MEMORY, grace_driver_missing, group_not_viable, no_reset
from gpuvirt.model.reasons.notoffered import boot_console as console_reason
from gpuvirt.paths import HostPath

SYSFB_INIT = (5, 15)
"""Since this kernel, `sysfb_init` passes the firmware's framebuffer to every driver that shows it."""

FIRST_TURING = 0x1E00
"""NVIDIA's device ids of GPUs ascend with their generations; pci.ids has none of Volta or before from here on."""
LAST_FOR_VOLTA = 580
"""The last branch of NVIDIA's driver for Maxwell, Pascal and Volta (release notes of 580 and 590)."""

VFIO_PCI = frozenset({"vfio", "vfio_pci", "vfio_pci_core"})
"""vfio-pci and the modules that it requires."""

OR_MOUNT = "or in a container mount the host's /lib/modules below --host-root"


def vfio_modules(evidence: Evidence) -> Iterator[Finding]:
    """VFIO's modules are loaded, or can be."""
    setup = evidence.setup
    running = {*setup.modules.known, *setup.builtin_modules.known}
    needed = ["vfio_pci"]
    if not evidence.inventory.facts.platform.iommufd:
        needed.append("vfio_iommu_type1")
    lists = (setup.modules, setup.builtin_modules, setup.available_modules)
    missing = [name for name in needed if name not in running]
    loadable = [name for name in missing if name in setup.available_modules.known]
    if evidence.on_vfio or not missing:
        present = [parameter for parameter in setup.vfio_parameters if parameter.text]
        parameters = ", ".join(f"{parameter.path.rpartition('/')[2]}={parameter.shown}" for parameter in present)
        shown = Listing(setup.modules.path, tuple(name for name in needed if name in setup.modules.known))
        yield fine("VFIO's modules", f"are loaded{f' ({parameters})' if parameters else ''}", shown)
    elif loadable == missing:
        shown = Listing(setup.available_modules.path, tuple(loadable))
        yield fine("VFIO's modules", "are not loaded, but available: modprobe vfio-pci", shown)
    elif any(isinstance(modules.names, Unread) for modules in lists):
        yield unread("VFIO's modules", "are not loaded; the list of available modules could not be read", *lists)
    elif setup.available_modules.names is None:
        without = "are not loaded; the host has no list of its kernel's modules"
        fix = f"install the modules of {f'kernel {of}' if (of := setup.release.text) else 'its kernel'}, {OR_MOUNT}"
        yield unread("VFIO's modules", without, *lists, fix=fix)
    else:
        reason = _missing(setup, *(name for name in missing if name not in loadable))
        yield of_reason(reason, reason.code.level, why="without it no GPU can be passed to a VM")


def _missing(setup: KernelSetup, *modules: str) -> Reason:
    places = seen(Listing(setup.available_modules.path, ()), setup.release)
    return refusals.vfio_missing(", ".join(modules), setup.release.text, *places)


def why_not_loadable(setup: KernelSetup) -> Iterator[Reason]:
    """Yield why vfio-pci is not loaded and can't be; nothing where a file does not show that for certain."""
    lists = (setup.modules, setup.builtin_modules, setup.available_modules)
    if "vfio_pci" in setup.modules.known:
        return
    is_known = isinstance(setup.available_modules.names, tuple)
    is_known &= not any(isinstance(modules.names, Unread) for modules in lists)
    if is_known and not any("vfio_pci" in modules.known for modules in lists):
        yield _missing(setup, "vfio_pci")
    for rule, steps in _blocks(setup, VFIO_PCI.__contains__):
        yield refusals.vfio_blocked(rule, "; ".join(steps))


def grace_driver(evidence: Evidence) -> Iterator[Finding]:
    """Each Grace GPU is on the VFIO driver that passes its memory to a VM, or that driver can be loaded."""
    setup = evidence.setup
    grace = [gpu.function for gpu in evidence.inventory.gpus.values() if gpu.function.needs_grace_driver]
    lists = (setup.modules, setup.builtin_modules, setup.available_modules)
    has_driver = any(GRACE_DRIVER in modules.known for modules in lists)
    lacking = [function for function in grace if function.driver == "vfio-pci" or not (has_driver or function.on_vfio)]
    if grace and not lacking:
        yield fine(f"{count_of(len(grace), 'GPU')} of Grace", f"with {GRACE_DRIVER}, or able to get it")
    is_unread = any(isinstance(modules.names, Unread) for modules in lists)
    for function in lacking:
        if is_unread and function.driver != "vfio-pci":
            yield unread(function.address, f"needs {GRACE_DRIVER}; the list of modules could not be read", *lists)
        else:
            found = Seen(setup.available_modules.path, f"{'has' if has_driver else 'lacks'} {GRACE_DRIVER}")
            address, driver = function.address, function.driver_name
            reason = grace_driver_missing(address, address, driver, found, has_driver=has_driver)
            yield of_reason(reason, Level.WARNING if evidence.settings.grace_without_driver else reason.code.level)


def modprobe_rules(evidence: Evidence) -> Iterator[Finding]:
    """No rule prevents loading VFIO's modules, and vfio-pci has the devices of its `ids=`."""
    setup = evidence.setup
    for folder in setup.modprobe_folders:
        if isinstance(folder.names, Unread):
            yield unread("the configuration of modprobe", "could not be read", folder)
    for file in setup.modprobe:
        if isinstance(file.value, Unread):
            yield unread("the configuration of modprobe", "could not be read", file)
    for rule, steps in _blocks(setup, lambda module: module.startswith("vfio")):
        reason = refusals.vfio_blocked(rule)
        is_loaded = "vfio_pci" in setup.modules.known
        why = "loaded now, but not after a boot" if is_loaded else "without them no GPU can be passed to a VM"
        yield of_reason(reason, Level.WARNING if is_loaded else reason.code.level, *steps, why=why)
    for where, text, desired in _ids(evidence, _rules(setup)):
        yield from _not_bound(evidence, where, text, desired)


def _blocks(setup: KernelSetup, concerns: Callable[[str], bool]) -> Iterator[tuple[Seen, tuple[str, ...]]]:
    """Yield the rules that keep out a module that `concerns` accepts, with the steps that remove the rule."""
    for where, words in _rules(setup):
        if words[0] == "install" and concerns(_module(words[1])) and re.search(r"/(false|true)$", words[2]):
            yield Seen(where, " ".join(words)[:200]), (f"remove the line from {where}",)
    banned = setup.argument("module_blacklist") or ""
    if any(concerns(_module(name)) for name in banned.split(",")):
        argument = f"module_blacklist={banned}"
        yield Seen(setup.cmdline.path, argument[:200]), drop_arguments(setup, argument)


def _rules(setup: KernelSetup) -> Iterator[tuple[HostPath, list[str]]]:
    """Yield the lines of modprobe's files that have three words or more (modprobe.d(5))."""
    for file in setup.modprobe:
        for line in (file.text or "").replace("\\\n", " ").splitlines():
            words = line.split()
            if len(words) >= 3 and not words[0].startswith("#"):
                yield file.path, words


def _module(name: str) -> str:
    return name.replace("-", "_")


def _ids(evidence: Evidence, rules: Iterable[tuple[HostPath, list[str]]]) -> Iterator[tuple[HostPath, str, set[PciId]]]:
    """Yield the device ids that vfio-pci is configured to bind, with the file and the text."""
    for where, words in rules:
        if words[0] == "options" and _module(words[1]) == "vfio_pci":
            for word in words[2:]:
                if word.startswith("ids="):
                    yield where, word, parse_ids(word.removeprefix("ids="))
    for name in ("vfio-pci.ids", "vfio_pci.ids"):
        if value := evidence.setup.argument(name):
            yield evidence.setup.cmdline.path, f"{name}={value}", parse_ids(value)


def parse_ids(text: str) -> set[PciId]:
    """Return the device ids in vfio-pci's `ids=`, each `vendor:device[:...]`; like vfio-pci, skip malformed ones."""
    found: set[PciId] = set()
    for word in text.strip('"').split(","):
        parts = word.split(":")
        try:
            found.add(parse_pci_id(":".join(part.zfill(4) for part in parts[:2])))
        except ValueError:
            continue
    return found


def _not_bound(evidence: Evidence, where: str, text: str, desired: set[PciId]) -> Iterator[Finding]:
    facts = evidence.inventory.facts
    stray = [
        function
        for function in facts.functions.values()
        if function.id in desired and not function.on_vfio
        if isinstance(function.driver, str) and function.iommu_group is not None
    ]
    if not stray:
        return
    drivers = sorted({str(function.driver) for function in stray})
    yield problem(
        FindingCode.IDS_NOT_BOUND,
        ", ".join(function.address for function in stray),
        f"has an id that vfio-pci is configured to bind, but is bound to {', '.join(drivers)}",
        (
            Seen(where, text[:200]),
            *(Seen(device_path(function.address, "driver"), str(function.driver)) for function in stray),
        ),
        why="the driver that is loaded first binds a device; vfio-pci binds only devices that no driver has",
        fix=(
            *(f"echo 'softdep {driver} pre: vfio-pci' >> /etc/modprobe.d/vfio.conf" for driver in drivers),
            remake_initramfs(evidence.setup),
            "reboot",
        ),
    )


def group_viability(evidence: Evidence) -> Iterator[Finding]:
    """No host driver has a function in the IOMMU group of a GPU on a VFIO driver."""
    not_viable_gpus = 0
    for gpu in evidence.on_vfio:
        group = gpu.function.iommu_group
        members = evidence.inventory.groups.get(group, ()) if isinstance(group, int) else ()
        others = (address for address in members if address != gpu.function.address)
        spoiling = group_blockers(evidence.inventory.facts.functions, others)
        if spoiling:
            not_viable_gpus += 1
            yield not_viable(gpu, spoiling)
    if evidence.on_vfio and not not_viable_gpus:
        yield fine(
            f"{count_of(len(evidence.on_vfio), 'GPU')} on a VFIO driver",
            "without a function on a host driver in the same IOMMU group",
        )


def not_viable(gpu: Gpu, spoiling: tuple[PciFunction, ...]) -> Finding:
    """Return the finding for a GPU whose group no VM can open, since the host uses some of its functions."""
    reason = group_not_viable(gpu.function.address, gpu.function.address, spoiling)
    why = "the kernel lets a VM open a group only if no host driver has any function of it; the VM does not start"
    return of_reason(reason, reason.code.level, why=why)


def fighting_drivers(evidence: Evidence) -> Iterator[Finding]:
    """nouveau has no GPU, and is not loaded beside nvidia."""
    gpus = [gpu.function for gpu in evidence.inventory.gpus.values() if gpu.function.id.vendor == NVIDIA]
    taken = [function for function in gpus if function.driver == "nouveau"]
    both = {"nouveau", "nvidia"} <= set(evidence.setup.modules.known)
    if not taken and not both:
        if gpus:
            yield fine("nouveau", "has no NVIDIA GPU")
        return
    message = f"has {', '.join(function.address for function in taken)}" if taken else "is loaded beside nvidia"
    shown = tuple(Seen(device_path(function.address, "driver"), "nouveau") for function in taken)
    yield problem(
        FindingCode.DRIVERS_FIGHT,
        "nouveau",
        message,
        shown or (Seen(evidence.setup.modules.path, "nouveau nvidia"),),
        level=None if taken else Level.WARNING,  # neither containers nor VMs can use a GPU on nouveau
        why="either driver may bind a GPU at boot; unbinding a GPU from nouveau that shows the console can hang",
        fix=(
            "printf 'blacklist nouveau\\noptions nouveau modeset=0\\n' > /etc/modprobe.d/nouveau.conf",
            remake_initramfs(evidence.setup),
            "reboot",
        ),
    )


def host_driver(evidence: Evidence) -> Iterator[Finding]:
    """NVIDIA's driver supports each GPU that no driver has."""
    version = evidence.inventory.facts.platform.nvidia_version or ""
    for gpu in evidence.inventory.gpus.values():
        function = gpu.function
        is_old = function.id.vendor == NVIDIA and function.id.device < FIRST_TURING
        if is_old and function.driver is None and branch_of(version) > LAST_FOR_VOLTA:
            yield problem(
                FindingCode.DRIVER_UNFIT,
                function.address,
                f"is older than Turing, and NVIDIA's driver {version} does not support it",
                (
                    Seen("/sys/module/nvidia/version", version),
                    Seen(device_path(function.address, "device"), f"0x{function.id.device:04x}"),
                ),
                why="the driver leaves such a GPU alone, so neither containers nor vGPUs can use it",
                fix=(f"install a driver of branch R{LAST_FOR_VOLTA} (vGPU 19), the last one that supports this GPU",),
            )


def branch_of(version: str) -> int:
    """Return the branch of a version of NVIDIA's driver: 580 for 580.159.04; 580 where it has none, too."""
    match = re.match(r"[0-9]{3}(?=\.)", version)
    return int(match[0]) if match else LAST_FOR_VOLTA


def boot_console(evidence: Evidence) -> Iterator[Finding]:
    """No GPU on a VFIO driver shows the host's console."""
    for gpu, setup in evidence.gpu_setups():
        if not gpu.function.on_vfio:
            continue
        if isinstance(setup.boot_vga.value, Unread):
            yield unread(gpu.function.address, "may be the GPU of the firmware's screen", setup.boot_vga)
        elif (use := gpu.function.console) is not None:
            screens = (buffer.name for buffer in evidence.setup.framebuffers)
            own = (name for name in screens if f"({name.path.split('/')[-2]})" in use)
            reason = console_reason(gpu.function.address, gpu.function.address, use)
            reason = replace(reason, places=seen(setup.boot_vga, *own))
            yield of_reason(
                reason, reason.code.level, *set_arguments(evidence.setup, _without_screen(evidence.setup.release))
            )


def _without_screen(release: Attribute) -> str:
    is_new = kernel_series(release.text or "", SYSFB_INIT) >= SYSFB_INIT
    return "initcall_blacklist=sysfb_init" if is_new else "video=efifb:off"


def reset_methods(evidence: Evidence) -> Iterator[Finding]:
    """Every GPU on a VFIO driver can be reset."""
    resettable: list[Attribute] = []
    for gpu, setup in evidence.gpu_setups():
        method = setup.reset_method
        if not gpu.function.on_vfio or method is None:
            continue
        if isinstance(method.value, Unread):
            yield unread(gpu.function.address, "has reset methods that could not be read", method)
        elif method.text or (method.value is None and setup.reset.exists is True):
            resettable.append(method)
        elif method.value is None and isinstance(setup.reset.exists, Unread):
            yield unread(gpu.function.address, "has reset methods that could not be read", setup.reset)
        elif (reset := reset_of(evidence.inventory.facts.functions, gpu.function.address)) is Reset.POSSIBLE:
            resettable.append(method)
        elif reset is Reset.UNKNOWN:
            yield unread(gpu.function.address, "has reset methods that could not be read", method)
        else:
            against = no_reset(gpu.function.address, gpu.function, *seen(method, setup.reset))
            yield of_reason(against, Level.WARNING, why=KEEPS_MEMORY)
    if resettable:
        yield fine(f"{count_of(len(resettable), 'GPU')} on a VFIO driver", "can be reset", resettable[0])
