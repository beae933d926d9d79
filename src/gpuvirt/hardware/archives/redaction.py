"""A kernel that redacts secrets from files; support archives read the host only through it.

Files that people or programs have written may contain passwords. Each kind of such files is reduced to the parts that
concern devices. A file of an unknown kind is treated as the configuration of a container runtime, of which almost
nothing is kept.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from gpuvirt.facts.ids import IommuGroup
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import ATTRIBUTE_BYTES, Kernel
from gpuvirt.hardware.access.openfiles import OpenFile
from gpuvirt.hardware.host import runtimes
from gpuvirt.hardware.host.runtimes import LEFT_OUT as LEFT
from gpuvirt.paths import HostPath

LEFT_OUT: Mapping[str, str] = {
    "/proc/modules": "the addresses of modules are written as 0",
    "/proc/cmdline": f"only values of arguments about devices are kept; others are written as {LEFT}",
    "/proc/cpuinfo": "the first processor, without serial numbers",
    "/etc/os-release": "only the id and the version of the operating system",
    "modules.dep, modules.builtin": "only modules for GPUs and VMs",
    "modprobe.d": "only lines that block or configure modules for GPUs and VFIO; no comments, no commands",
    "configurations of container runtimes and of Kata": "only the CDI settings, imported files, the"
    " handlers of Kata, and Kata's settings for devices",
    "CDI specs": "only the version, the kind and the names of the devices",
    "boot loaders' files": "only whether they exist",
}
"""The files that are redacted, with the parts that are kept."""

_CPU = re.compile(
    r"(?:processor|vendor_id|cpu family|model|model name|stepping|microcode|flags|Features"
    r"|CPU (?:implementer|architecture|variant|part|revision))\s*:"
)
_OS = re.compile(r"(?:ID|ID_LIKE|VERSION_ID|VARIANT_ID)=[-\"'A-Za-z0-9 _.]{0,64}")
_MODULE = re.compile(
    r"(?:vfio|kvm|iommu|nvidia|nvgrace|nouveau|nova|mdev|amdgpu|amdxcp|radeon|i915|xe|drm|snd_hda_intel|irqbypass)[a-z0-9_]*"
)
"""Modules for GPUs and VMs, with `_` for `-`."""
_MODULE_ADDRESS = re.compile(r"0x[0-9a-f]{8,}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NOTHING = re.compile(r"/[a-z/]{0,32}/(?:false|true)")
"""The commands by which `install` lines block a module."""
_OPTION = re.compile(
    r"(?:ids=\"?[0-9A-Fa-f:,]{0,512}\"?"
    r"|(?:disable_vga|disable_idle_d3|enable_sriov|allow_unsafe_interrupts|modeset|nested|ignore_msrs|max_vfs"
    r"|enable_guc|enable_mtty|fbdev)=[0-9A-Za-z]{1,2})"
)
_ORDER = ("pre:", "post:")


class Discreet:
    """A kernel whose files are read without secrets."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    @property
    def pids(self) -> frozenset[int]:
        """The pids of the processes that have leases."""
        return self._kernel.pids

    def read(self, path: HostPath, /, *, limit: int = ATTRIBUTE_BYTES) -> bytes:
        """Return the first bytes of a redacted file."""
        reduce = _reducing(path)
        if reduce is None:
            return self._kernel.read(path, limit=limit)
        text = self._kernel.read(path, limit=attributes.FILE_BYTES).decode(errors="replace")
        return reduce(text).encode()[:limit]

    def write(self, path: HostPath, data: bytes, /) -> None:
        """Write a file."""
        self._kernel.write(path, data)

    def listdir(self, path: HostPath, /) -> Sequence[str]:
        """Return the names in a folder."""
        return self._kernel.listdir(path)

    def readlink(self, path: HostPath, /) -> str:
        """Return where a symbolic link points."""
        return self._kernel.readlink(path)

    def device_number(self, path: HostPath, /) -> int:
        """Return the device number of a node."""
        return self._kernel.device_number(path)

    def lease(self, group: IommuGroup, /) -> AbstractContextManager[None]:
        """Hold a VFIO group open."""
        return self._kernel.lease(group)

    def lease_devices(self, names: Sequence[str], /) -> AbstractContextManager[None]:
        """Hold all VFIO devices of a group."""
        return self._kernel.lease_devices(names)

    def open_files(self, *, mapped: bool = False) -> Iterator[OpenFile]:
        """Yield the nodes that processes have open."""
        return self._kernel.open_files(mapped=mapped)

    def on_uevent(self, wake: Callable[[], None], /) -> Callable[[], None]:
        """Call `wake` when a device is added, removed or changes its driver."""
        return self._kernel.on_uevent(wake)


def _reducing(path: str) -> Callable[[str], str] | None:
    """Return the function that redacts a file, None for a file of the kernel without secrets."""
    if path in _BY_PATH:
        return _BY_PATH[path]
    if path.startswith("/lib/modules/"):
        return _modules
    if "/modprobe.d/" in path:
        return _modprobe
    if path.startswith(tuple(f"{folder}/" for folder in runtimes.CDI_FOLDERS)):
        return runtimes.cdi_without_secrets
    return None if path.startswith(("/sys/", "/proc/", "/dev/")) else runtimes.without_secrets


def _cpuinfo(text: str) -> str:
    lines = text.partition("\n\n")[0].splitlines()
    return "".join(f"{line}\n" for line in lines if _CPU.match(line)) + "\n"


def _os_release(text: str) -> str:
    return "".join(f"{line}\n" for line in text.splitlines() if _OS.fullmatch(line.strip()))


def _loaded(text: str) -> str:
    return _MODULE_ADDRESS.sub("0x0000000000000000", text)


def _modules(text: str) -> str:
    """Return the lines of modules.dep or modules.builtin of modules for GPUs and VMs, without their dependencies."""
    files = (line.partition(":")[0] for line in text.splitlines())
    return "".join(f"{file}:\n" for file in files if _is_kept(file.rpartition("/")[2].partition(".ko")[0]))


def _is_kept(module: str) -> bool:
    return bool(_MODULE.fullmatch(module.replace("-", "_")))


def _modprobe(text: str) -> str:
    """Return the redacted lines of a file of modprobe.d(5)."""
    lines = (line.split() for line in text.replace("\\\n", " ").splitlines())
    kept = (_rule(words[0], words[1], words[2:]) for words in lines if len(words) >= 2 and _NAME.fullmatch(words[1]))
    return "".join(f"{' '.join(words)}\n" for words in kept if words)


def _rule(directive: str, module: str, words: Sequence[str]) -> list[str]:
    is_kept = _is_kept(module)
    match directive:
        case "blacklist" if is_kept:
            return [directive, module]
        case "softdep" if is_kept or any(map(_is_kept, words)):
            return [directive, module, *(word if word in _ORDER or _is_kept(word) else LEFT for word in words)]
        case "install" if is_kept and words:
            command = words[0] if _NOTHING.fullmatch(words[0]) else LEFT
            return [directive, module, command, *([LEFT] if len(words) > 1 else [])]
        case "options" if is_kept and words:
            return [directive, module, *(word if _OPTION.fullmatch(word) else LEFT for word in words)]
        case _:
            return []


_BY_PATH: Mapping[str, Callable[[str], str]] = {
    "/proc/cpuinfo": _cpuinfo,
    "/proc/cmdline": runtimes.without_strange_values,
    "/proc/modules": _loaded,
    "/etc/os-release": _os_release,
}
