"""Configurations of container runtimes: containerd's with the files that they import, CRI-O's with its drop-ins.

containerd (LoadConfig in cmd/containerd/server/config/config.go) takes an import relative to the file that names it,
matches it as a pattern where it has a `*`, loads each file once, and imports of imports after all that came before.
"""

import re
from collections.abc import Iterator, Mapping
from errno import E2BIG
from fnmatch import fnmatchcase
from posixpath import dirname, join, normpath

from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute
from gpuvirt.facts.runtimes import CDI_KEYS, Runtime, cdi_tables, parse_toml
from gpuvirt.hardware import attributes
from gpuvirt.hardware.attributes import read_attribute, read_listing
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.paths import HostPath

CONTAINERD = (
    "/etc/containerd/config.toml",
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
)
CRIO = "/etc/crio/crio.conf"
CRIO_FOLDER = "/etc/crio/crio.conf.d"
MOST_FILES = 64
"""That one configuration may import, and that one pattern may match."""

ACTING = re.compile(r"/(?:dev|proc|sys)(?:/|$)")
"""Where files may act or sleep when they are opened; no configuration lies there."""

LEFT_OUT = "(left-out)"
NO_TOML = f"{LEFT_OUT} no TOML\n"
_PLAIN = re.compile(r"[-A-Za-z0-9_./*?\[\]@+~]{1,256}")
"""A path, or a pattern of paths."""


def read_runtimes(kernel: Kernel) -> Iterator[Runtime]:
    """Yield the configurations that there are."""
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
        for one in _imports(kernel, path, document or {}):
            if isinstance(one, Unread):
                found[one.path] = Attribute(one.path, one)
            else:
                pending.append(one)
    return tuple(file for file in found.values() if file.value is not None)


def _imports(kernel: Kernel, parent: HostPath, document: Mapping[str, object]) -> Iterator[HostPath | Unread]:
    imports = document.get("imports")
    for one in imports if isinstance(imports, list) else ():
        if not isinstance(one, str) or "\0" in one:
            continue
        # With all `..` gone, a path stays below the host's root wherever that is.
        path = normpath(join(dirname(parent), one)).replace("//", "/")
        if ACTING.match(path):
            continue
        if "*" in path:
            yield from _matches(kernel, path)
        else:
            yield HostPath(path)


def _matches(kernel: Kernel, pattern: str) -> Iterator[HostPath | Unread]:
    """Yield what a pattern matches, in the order of names; a part without a wildcard need not be there."""
    found = [""]
    for part in pattern.strip("/").split("/"):
        if not any(one in part for one in "*?["):
            found = [f"{folder}/{part}" for folder in found]
            continue
        matching: list[str] = []
        for folder in found:
            if ACTING.match(folder):
                continue
            listing = read_listing(kernel, folder or "/")
            if isinstance(listing.names, Unread):
                yield listing.names
            desired = part.replace("[^", "[!")
            matching += [f"{folder}/{name}" for name in listing.known if fnmatchcase(name, desired)]
        found = [path for path in matching if not ACTING.match(path)][: MOST_FILES + 1]
    yield from map(HostPath, found)


def without_secrets(text: str) -> str:
    """Return of a configuration what it says of CDI and which files it imports; registries' passwords stand there too.

    What is no TOML stays none.
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
    return "".join(f"{line}\n" for line in lines)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _list(value) if isinstance(value, list) else f'"{LEFT_OUT}"'


def _list(values: list[object]) -> str:
    kept = (one if isinstance(one, str) and _PLAIN.fullmatch(one) else LEFT_OUT for one in values)
    return "[" + ", ".join(f'"{one}"' for one in kept) + "]"
