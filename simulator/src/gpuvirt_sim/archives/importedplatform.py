"""The platform part of a host file that is made of an imported host, so that doctor reads the same values on both."""

import re
from collections.abc import Callable, Iterable

import msgspec

from gpuvirt.facts.platform import Attribute, Framebuffer, Listing, Presence
from gpuvirt.facts.setup import Part, Setup, parts
from gpuvirt.hardware.archives.hostcopy import is_safe
from gpuvirt.hardware.host import platform as read
from gpuvirt_sim.devices.function import resource
from gpuvirt_sim.devices.platform import (
    ABSOLUTE_PATH,
    BOOT_FILES,
    USUAL_TABLES,
    Boot,
    Cpu,
    PlatformSpec,
    ScreenSpec,
)

MOST_ROUNDS = 4
"""The content of one file can decide which other files are read; two rounds were enough for every host so far."""
FIRMWARES_SCREEN = "efi-framebuffer.0"
_SCREEN = re.compile(r"/sys/class/graphics/fb([0-9]{1,2})/name")
_AMD = re.compile(r"^vendor_id\s*:\s*(?:AuthenticAMD|HygonGenuine)", re.MULTILINE)
_FLAGS = re.compile(r"^flags\s*:(.*)$", re.MULTILINE)
_PATH = re.compile(ABSOLUTE_PATH)


def platform_of(host: Setup, show: Callable[[PlatformSpec], Setup]) -> PlatformSpec:
    """Return the platform of an imported host; `show` returns what is read on a simulated host with a given platform.

    Properties that PlatformSpec has a field for go into that field, all others into its files.
    """
    spec = _named(host)
    for _ in range(MOST_ROUNDS):
        amended = _Amending(spec, host, show(spec)).amended()
        if amended == spec:
            break
        spec = amended
    return spec


def _named(host: Setup) -> PlatformSpec:
    cpu = host.cpu.text or ""
    found = _FLAGS.search(cpu)
    flags = frozenset(found[1].split()) if found else frozenset()
    default, chips = PlatformSpec(), host.irq_chips if isinstance(host.irq_chips, tuple) else ()
    available = host.available_modules.names
    console = _console(host)
    return PlatformSpec(
        cpu=Cpu.ARM if "CPU implementer" in cpu else Cpu.AMD if _AMD.search(cpu) else Cpu.INTEL,
        virtualization=bool(flags & {"vmx", "svm"}) if flags else default.virtualization,
        hypervisor="hypervisor" in flags,
        product=host.dmi.text or default.product,
        release=host.release.text if host.release.text and is_safe(host.release.text) else default.release,
        boot=_boot(host),
        kvm=host.kvm.exists is True,
        interrupt_remapping=any(chip.text and chip.text.startswith("IR-") for chip in chips) if chips else True,
        unsafe_interrupts=host.unsafe_interrupts.text == "Y",
        available=available if isinstance(available, tuple) and all(map(is_safe, available)) else default.available,
        console=console,
        screen=(host.framebuffers[0].name.text or "") if console else default.screen,
        screens=() if console else tuple(spec for screen in host.framebuffers for spec in _screen(screen)),
        without_reset=tuple(
            address
            for address, function in sorted(host.functions.items())
            if function.reset.exists is False and (function.reset_method is None or function.reset_method.value is None)
        ),
        bars_unassigned=tuple(
            address
            for address, function in sorted(host.functions.items())
            if function.resource.text == resource(unassigned=True).strip()
        ),
    )


def _boot(host: Setup) -> Boot:
    """Return the boot loader whose files are most similar to the host's."""
    existing: set[str] = {file.path for file in host.boot_files if file.exists is True}

    def difference(boot: Boot) -> tuple[int, bool, bool]:
        names = BOOT_FILES[boot]
        expected = {path for path in read.BOOT_FILES if any(f"{name}/".startswith(f"{path}/") for name in names)}
        other_system = names.get("/etc/os-release", "").strip() != (host.os_release.text or "")
        return len(expected ^ existing), other_system, boot is not Boot.NONE

    return min(Boot, key=difference)


def _console(host: Setup) -> str | None:
    """Return the GPU on which the firmware shows its screen, where that is the only screen."""
    gpus = [address for address, function in sorted(host.functions.items()) if function.boot_vga.text == "1"]
    screens = [(screen.device.target, screen.name.path) for screen in host.framebuffers if screen.name.text]
    alone = screens == [(FIRMWARES_SCREEN, "/sys/class/graphics/fb0/name")]
    return gpus[0] if alone and len(gpus) == len(host.framebuffers) == 1 else None


def _screen(screen: Framebuffer) -> list[ScreenSpec]:
    number, device = _SCREEN.fullmatch(screen.name.path), screen.device.target
    if number is None:
        return []
    shown_by = device if isinstance(device, str) and is_safe(device) else None
    return [ScreenSpec(number=int(number[1]), name=screen.name.text, device=shown_by)]


class _Amending(msgspec.Struct):
    """Amends a platform by the differences between a host and the simulated host with that platform."""

    spec: PlatformSpec
    host: Setup
    shown: Setup
    files: dict[str, str] = msgspec.field(default_factory=dict)
    missing: set[str] = msgspec.field(default_factory=set)
    folders: set[str] = msgspec.field(default_factory=set)
    acpi: tuple[str, ...] | None = None

    def amended(self) -> PlatformSpec:
        self.files, self.acpi = dict(self.spec.files), self.spec.acpi
        self.missing, self.folders = set(self.spec.missing), set(self.spec.folders)
        if self.host.modules != self.shown.modules and self.spec.modules is None and self.host.modules.known:
            # The modules decide which parameters exist.
            modules = tuple(filter(is_safe, self.host.modules.known))
            return msgspec.structs.replace(self.spec, modules=modules)
        host, shown = parts(self.host), parts(self.shown)
        differing = [path for path in sorted({*host, *shown}) if host.get(path) != shown.get(path)]
        if any(path.startswith(read.IRQS) for path in differing):
            # Which interrupts are read depends on those before them.
            self.missing.add(read.IRQS)
            differing += [path for path in host if path.startswith(read.IRQS)]
        for path in differing:
            if not path.startswith(read.IRQS) or path in host:
                self._amend(path, host.get(path), shown.get(path))
        return msgspec.structs.replace(
            self.spec,
            acpi=self.acpi,
            missing=_places(self.missing - self.files.keys() - self.folders),
            folders=_places(self.folders),
            files={path: self.files[path] for path in _places(self.files.keys())},
        )

    def _amend(self, path: str, host: Part | None, shown: Part | None) -> None:
        match host:
            case None | Attribute(value=None) | Listing(names=None) | Presence(exists=False):
                self.missing.add(path)
            case Attribute(value=str(text)):
                self.files[path] = f"{text}\n" if text else ""
            case Presence(exists=True):
                self._make(path)
            case Listing(names=tuple(names)):
                self._list(path, names, shown.known if isinstance(shown, Listing) else ())
            case _:  # a value that could not be read keeps its default, and is reported as a difference
                return

    def _make(self, path: str) -> None:
        if path.endswith("/entries"):
            self.folders.add(path)
        else:
            self.files[path] = ""

    def _list(self, path: str, names: tuple[str, ...], shown: tuple[str, ...]) -> None:
        safe = tuple(filter(is_safe, names))
        match path:
            case self.host.acpi_tables.path:
                self.acpi = tuple(name for name in safe if name not in USUAL_TABLES)
                self.missing |= {f"{path}/{name}" for name in USUAL_TABLES if name not in safe}
                if not safe:
                    self.folders.add(path)
            case self.host.builtin_modules.path:
                self.files[path] = "".join(f"{name}.ko:\n" for name in safe)
            case self.host.iommus.path:
                self.folders |= {path, *(f"{path}/{name}" for name in {*safe} - {*shown})}
                self.missing |= {f"{path}/{name}" for name in {*shown} - {*names}}
            case _ if any(folder.path == path for folder in self.host.modprobe_folders):
                self.folders.add(path)
                self.files |= {f"{path}/{name}": "" for name in safe if f"{path}/{name}" not in parts(self.host)}
            case _:  # the simulated devices make the other lists
                return


def _places(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths that a host file can contain, sorted."""
    return tuple(sorted(path for path in paths if _PATH.fullmatch(path)))
