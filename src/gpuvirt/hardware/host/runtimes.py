"""Reads the configurations of container runtimes: containerd's with its imports, CRI-O's with its drop-ins.

containerd (LoadConfig in cmd/containerd/server/config/config.go) resolves an import relative to the file that names it,
treats it as a pattern where it has a `*`, loads each file once, and loads the imports of imports after all earlier
imports.
"""

import re
from collections.abc import Iterator, Mapping
from errno import E2BIG
from fnmatch import fnmatchcase
from posixpath import dirname, join, normpath

from gpuvirt.facts.kata import kata_handlers, kata_settings
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute
from gpuvirt.facts.runtimes import CDI_KEYS, Runtime, cdi_tables, parse_toml
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.attributes import read_attribute, read_listing
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.paths import HostPath

LEFT_OUT = "(left-out)"

_OF_DEVICES = re.compile(
    r"(?:intel_iommu|amd_iommu|iommu|amd_iommu_intr|intremap|vfio|nvidia|nouveau|amdgpu|i915|xe|radeon|pci|pcie_[a-z_]+|kvm"
    r"|vfio_[a-z0-9_]+|nvidia_[a-z_]+|kvm_[a-z]+|pci_[a-z_]+|snd_hda_intel|modprobe|module_blacklist|rd\.driver"
    r"|initcall_blacklist|video|vga|efifb|simpledrm|console|fbcon|default_hugepagesz|hugepagesz|hugepages|hugetlb"
    r"|isolcpus|nohz_full|rcu_nocbs|irqaffinity|numa|numa_balancing|mem|memmap|mitigations|lockdown|preempt"
    r"|systemd\.unified_cgroup_hierarchy|cgroup_[a-z_]+|swiotlb|noapic|nox2apic|acpi|efi|init_on_alloc)"
    r"(?:\.[A-Za-z0-9_.]+)?"
)
"""Arguments whose values are kept: they configure the IOMMU, drivers, consoles and memory."""
_BARE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


def without_strange_values(line: str) -> str:
    """Return the command line without the values of arguments that do not concern devices.

    Installers, disk encryption and cluster bootstraps pass addresses with passwords and tokens in such values. The
    arguments after `--` are for init.
    """
    before, dashes, _ = line.strip().partition(" -- ")
    kept = [_kept(argument) for argument in before.replace('"', " ").split()]
    return " ".join([*kept, *(["--", LEFT_OUT] if dashes else [])]) + "\n"


def _kept(argument: str) -> str:
    name, equals, value = argument.partition("=")
    if not _BARE.fullmatch(name):
        return LEFT_OUT
    if not equals or (_OF_DEVICES.fullmatch(name.replace("-", "_")) and "//" not in value):
        return argument
    return f"{name}={LEFT_OUT}"


CONTAINERD = (
    "/etc/containerd/config.toml",
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
)
CRIO = "/etc/crio/crio.conf"
CRIO_FOLDER = "/etc/crio/crio.conf.d"
MOST_FILES = 64
"""The most files that one configuration may import, and that one pattern may match."""

ACTING = re.compile(r"/(?:dev|proc|sys)(?:/|$)")
"""Folders whose files may act or sleep when they are opened, and which have no configurations."""

NO_TOML = f"{LEFT_OUT} no TOML\n"
_PLAIN = re.compile(r"[-A-Za-z0-9_./*?\[\]@+~]{1,256}")
"""A path, or a pattern of paths."""


def read_runtimes(kernel: Kernel) -> Iterator[Runtime]:
    """Yield the existing configurations."""
    for path in CONTAINERD:
        if files := _with_imports(kernel, HostPath(path)):
            yield Runtime(files)
    drop_ins = read_listing(kernel, CRIO_FOLDER)
    for path in (CRIO, *(f"{drop_ins.path}/{name}" for name in drop_ins.known)):
        file = read_attribute(kernel, path, limit=attributes.FILE_BYTES)
        if file.value is not None:
            yield Runtime((file,))


def _with_imports(kernel: Kernel, own: HostPath) -> tuple[Attribute, ...]:
    found: dict[HostPath, Attribute] = {}
    pending = [own]
    while pending:
        path = pending.pop(0)
        if path in found:
            continue
        if len(found) == MOST_FILES:
            found[path] = Attribute(path, Unread(path, errno=E2BIG))
            break
        found[path] = file = read_attribute(kernel, path, limit=attributes.FILE_BYTES)
        document = parse_toml(file.text) if file.text is not None else None
        for imported in _imports(kernel, path, document or {}):
            if isinstance(imported, Unread):
                found[imported.path] = Attribute(imported.path, imported)
            else:
                pending.append(imported)
    return tuple(file for file in found.values() if file.value is not None)


def _imports(kernel: Kernel, parent: HostPath, document: Mapping[str, object]) -> Iterator[HostPath | Unread]:
    imports = document.get("imports")
    for imported in imports if isinstance(imports, list) else ():
        if not isinstance(imported, str) or "\0" in imported:
            continue
        # A path without `..` stays below the host's root, wherever that is mounted.
        path = normpath(join(dirname(parent), imported)).replace("//", "/")
        if ACTING.match(path):
            continue
        if "*" in path:
            yield from _matches(kernel, path)
        else:
            yield HostPath(path)


def _matches(kernel: Kernel, pattern: str) -> Iterator[HostPath | Unread]:
    """Yield the paths that match a pattern, sorted by name; a component without a wildcard need not exist."""
    found = [""]
    for part in pattern.strip("/").split("/"):
        if not any(wildcard in part for wildcard in "*?["):
            found = [f"{folder}/{part}" for folder in found]
            continue
        matching: list[str] = []
        for folder in found:
            if ACTING.match(folder):
                continue
            listing = read_listing(kernel, folder or "/")
            if isinstance(listing.names, Unread):
                yield listing.names
            shell_pattern = part.replace("[^", "[!")
            matching += [f"{folder}/{name}" for name in listing.known if fnmatchcase(name, shell_pattern)]
        found = [path for path in matching if not ACTING.match(path)][: MOST_FILES + 1]
    yield from map(HostPath, found)


def without_secrets(text: str) -> str:
    """Return a configuration's CDI settings and imports, its handlers of Kata, and Kata's settings for devices.

    Passwords of registries are not kept. Of a text that is not TOML nothing is kept, and the result is not TOML either.
    """
    document = parse_toml(text)
    if document is None:
        return NO_TOML
    lines: list[str] = []
    version, imports = document.get("version"), document.get("imports")
    if version is not None:
        lines.append(f"version = {version}" if type(version) is int else f'version = "{LEFT_OUT}"')
    if isinstance(imports, list):
        lines.append(f"imports = {_list(imports)}")
    for path, table in cdi_tables(document):
        lines.append(f'[{path[0]}."{path[1]}"]')
        lines += [f"{key} = {_value(table[key])}" for key in CDI_KEYS if key in table]
    lines += _kata_lines(document)
    return "".join(f"{line}\n" for line in lines)


def _kata_lines(document: Mapping[str, object]) -> Iterator[str]:
    for handler in kata_handlers(document):
        yield f"[{handler.table}]"
        yield f'runtime_type = "{handler.type}"'
        paths = {"runtime_path": handler.shim, "runtime_config_path": handler.config}
        yield from (f'{key} = "{_path(path)}"' for key, path in paths.items() if path)
    for section, values in kata_settings(document):
        yield f"[{section}]"
        yield from (f"{key} = {_setting(value)}" for key, value in values.items())


def _path(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else LEFT_OUT


def _setting(value: object) -> str:
    if isinstance(value, str):
        return f'"{value if _PLAIN.fullmatch(value) or not value else LEFT_OUT}"'
    return str(value) if type(value) is int else _value(value)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _list(value) if isinstance(value, list) else f'"{LEFT_OUT}"'


def _list(values: list[object]) -> str:
    kept = (value if isinstance(value, str) and _PLAIN.fullmatch(value) else LEFT_OUT for value in values)
    return "[" + ", ".join(f'"{value}"' for value in kept) + "]"
