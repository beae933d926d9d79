"""A kernel whose files tell no secrets: what is handed on of a host is what is read through it.

Whatever people or programs have written may hold passwords. Each kind of such a file is reduced here to what decides on
devices; one of no kind that is known is taken for a container runtime's, of which next to nothing is left.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from gpuvirt.facts.ids import IommuGroup
from gpuvirt.hardware import attributes, cmdline, runtimes
from gpuvirt.hardware.cmdline import LEFT_OUT as LEFT
from gpuvirt.hardware.kernel import ATTRIBUTE_BYTES, Kernel, OpenFile
from gpuvirt.paths import HostPath

LEFT_OUT: Mapping[str, str] = {
    "/proc/modules": "the addresses of modules are written as 0",
    "/proc/cmdline": f"only values are kept that speak of devices; others read {LEFT}",
    "/proc/cpuinfo": "its first processor, without serial numbers",
    "/etc/os-release": "which system it is, by its id and version",
    "modules.dep, modules.builtin": "only modules that have to do with GPUs and virtual machines",
    "modprobe.d": "only lines that keep modules of GPUs and VFIO out or give them devices; no comments, no commands",
    "configurations of container runtimes": "only what they say of CDI and which files they import",
    "boot loaders' files": "only that they are there",
}
"""What is reduced, and to what."""

_CPU = re.compile(
    r"(?:processor|vendor_id|cpu family|model|model name|stepping|microcode|flags|Features"
    r"|CPU (?:implementer|architecture|variant|part|revision))\s*:"
)
_OS = re.compile(r"(?:ID|ID_LIKE|VERSION_ID|VARIANT_ID)=[-\"'A-Za-z0-9 _.]{0,64}")
_MODULE = re.compile(
    r"(?:vfio|kvm|iommu|nvidia|nouveau|nova|mdev|amdgpu|amdxcp|radeon|i915|xe|drm|snd_hda_intel|irqbypass)[a-z0-9_]*"
)
"""Modules that have to do with GPUs and virtual machines, with `_` for `-`."""
_MODULE_ADDRESS = re.compile(r"0x[0-9a-f]{8,}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NOTHING = re.compile(r"/[a-z/]{0,32}/(?:false|true)")
"""The commands that stand for not loading a module."""
_OPTION = re.compile(
    r"(?:ids=\"?[0-9A-Fa-f:,]{0,512}\"?"
    r"|(?:disable_vga|disable_idle_d3|enable_sriov|allow_unsafe_interrupts|modeset|nested|ignore_msrs|max_vfs"
    r"|enable_guc|enable_mtty|fbdev)=[0-9A-Za-z]{1,2})"
)
_ORDER = ("pre:", "post:")


class Discreet:
    """A kernel, told of without secrets."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    @property
    def pids(self) -> frozenset[int]:
        """The kernel's."""
        return self._kernel.pids

    def read(self, path: HostPath, /, *, limit: int = ATTRIBUTE_BYTES) -> bytes:
        """Return the first bytes of what may be told of a file."""
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

    def open_files(self) -> Iterator[OpenFile]:
        """Yield the nodes that processes have open."""
        return self._kernel.open_files()

    def on_uevent(self, wake: Callable[[], None], /) -> Callable[[], None]:
        """Call `wake` when devices come, go or change driver."""
        return self._kernel.on_uevent(wake)


def _reducing(path: str) -> Callable[[str], str] | None:
    """Return what makes a file fit to be told, None for one of the kernel's that holds no secret."""
    if path in _BY_PATH:
        return _BY_PATH[path]
    if path.startswith("/lib/modules/"):
        return _modules
    if "/modprobe.d/" in path:
        return _modprobe
    return None if path.startswith(("/sys/", "/proc/", "/dev/")) else runtimes.without_secrets


def _cpuinfo(text: str) -> str:
    lines = text.partition("\n\n")[0].splitlines()
    return "".join(f"{line}\n" for line in lines if _CPU.match(line)) + "\n"


def _os_release(text: str) -> str:
    return "".join(f"{line}\n" for line in text.splitlines() if _OS.fullmatch(line.strip()))


def _loaded(text: str) -> str:
    return _MODULE_ADDRESS.sub("0x0000000000000000", text)


def _modules(text: str) -> str:
    """Return the lines of modules.dep or modules.builtin that are of a module to be told, without what it needs."""
    files = (line.partition(":")[0] for line in text.splitlines())
    return "".join(f"{file}:\n" for file in files if _is_told(file.rpartition("/")[2].partition(".ko")[0]))


def _is_told(module: str) -> bool:
    return bool(_MODULE.fullmatch(module.replace("-", "_")))


def _modprobe(text: str) -> str:
    """Return the lines of modprobe.d(5) that are to be told, each as far as it may be."""
    lines = (line.split() for line in text.replace("\\\n", " ").splitlines())
    kept = (_rule(words[0], words[1], words[2:]) for words in lines if len(words) >= 2 and _NAME.fullmatch(words[1]))
    return "".join(f"{' '.join(words)}\n" for words in kept if words)


def _rule(directive: str, module: str, words: Sequence[str]) -> list[str]:
    told = _is_told(module)
    match directive:
        case "blacklist" if told:
            return [directive, module]
        case "softdep" if told or any(map(_is_told, words)):
            return [directive, module, *(word if word in _ORDER or _is_told(word) else LEFT for word in words)]
        case "install" if told and words:
            command = words[0] if _NOTHING.fullmatch(words[0]) else LEFT
            return [directive, module, command, *([LEFT] if len(words) > 1 else [])]
        case "options" if told and words:
            return [directive, module, *(word if _OPTION.fullmatch(word) else LEFT for word in words)]
        case _:
            return []


_BY_PATH: Mapping[str, Callable[[str], str]] = {
    "/proc/cpuinfo": _cpuinfo,
    "/proc/cmdline": cmdline.without_strange_values,
    "/proc/modules": _loaded,
    "/etc/os-release": _os_release,
}
