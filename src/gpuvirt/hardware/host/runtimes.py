"""Reads the configurations of container runtimes and of Kata's, and the CDI specs of a host.

containerd's are read with their imports, CRI-O's with their drop-ins. containerd (LoadConfig in
cmd/containerd/server/config/config.go) resolves an import relative to the file that names it, treats it as a pattern
where it has a `*`, loads each file once, and loads the imports of imports after all earlier imports.

A handler names Kata's configuration, or Kata takes the first of its default paths that exists. Files of the folder
`config.d` beside it are merged over it, sorted by name (`src/libs/kata-types/src/config/drop_in.rs` and
`src/runtime/pkg/katautils/config.go`, Kata 4.1.0).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from errno import E2BIG
from fnmatch import fnmatchcase
from posixpath import dirname, join, normpath

from gpuvirt import plain
from gpuvirt.facts.cdispecs import has_edits, parse_spec
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute, Listing
from gpuvirt.facts.runtimes import (
    CDI_KEYS,
    RUST,
    Handler,
    KataRuntime,
    Runtime,
    cdi_tables,
    kata_handlers,
    kata_settings,
    parse_toml,
)
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.attributes import read_attribute, read_listing
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.paths import HostPath
from gpuvirt.plain import Plain

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


KATA_FOLDERS = (
    "/etc/kata-containers",
    "/usr/share/defaults/kata-containers",
    "/opt/kata/share/defaults/kata-containers",
)
"""The folders of Kata's default configuration; that of the runtime in Rust is in `runtime-rs` below them."""
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
"""Kata reads these folders, whatever the container runtime's setting is."""
CDI_ENDINGS = (".json", ".yaml")
NO_SPEC = f"{LEFT_OUT} no CDI spec\n"


def read_kata(kernel: Kernel, runtimes: Iterable[Runtime]) -> Iterator[KataRuntime]:
    """Yield Kata's runtimes, by the configurations of the container runtimes."""
    handlers: dict[str, Handler] = {}
    for runtime in runtimes:
        for file in runtime.files:
            document = parse_toml(file.text) if file.text is not None else None
            handlers |= {handler.name: handler for handler in kata_handlers(document or {})}
    for handler in list(handlers.values())[:MOST_FILES]:
        yield KataRuntime(handler, tuple(_files(kernel, handler)))


def _files(kernel: Kernel, handler: Handler) -> Iterator[Attribute]:
    below = f"/{RUST}" if handler.is_rust else ""
    usual = [f"{folder}{below}/configuration.toml" for folder in KATA_FOLDERS]
    for path in [handler.config] if handler.config else usual:
        if not path.startswith("/") or "\0" in path or ACTING.match(normpath(path)):
            continue
        file = read_attribute(kernel, normpath(path), limit=attributes.FILE_BYTES)
        if file.value is None:
            continue
        yield file
        drop_ins = read_listing(kernel, f"{dirname(normpath(path))}/config.d")
        for name in sorted(drop_ins.known)[:MOST_FILES]:
            if name.endswith(".toml"):
                yield read_attribute(kernel, f"{drop_ins.path}/{name}", limit=attributes.FILE_BYTES)
        return


def read_cdi_specs(kernel: Kernel) -> tuple[tuple[Listing, ...], tuple[Attribute, ...]]:
    """Return the folders of CDI specs, and the specs in them."""
    folders = tuple(read_listing(kernel, folder) for folder in CDI_FOLDERS)
    paths = (
        f"{folder.path}/{name}" for folder in folders for name in sorted(folder.known) if name.endswith(CDI_ENDINGS)
    )
    return folders, tuple(read_attribute(kernel, path, limit=attributes.FILE_BYTES) for path in paths)


def cdi_without_secrets(text: str) -> str:
    """Return the version, the kind and the names of the devices of a CDI spec; a spec that can't be parsed stays so.

    A variable stands for the edits of each device, without which Kata's runtime in Go would refuse the spec.
    """
    spec = parse_spec(text)
    if spec is None:
        return NO_SPEC
    kept: dict[str, Plain] = {"cdiVersion": spec.version, "kind": spec.kind}
    edits: dict[str, Plain] = {"containerEdits": {"env": ["LEFT=out"]}} if has_edits(text) else {}
    return plain.write({**kept, "devices": [{"name": name, **edits} for name in spec.devices]})
