"""Checks of container runtimes: whether they give pods the CDI devices that an answer names."""

import tomllib
from collections.abc import Iterator, Mapping

from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute
from gpuvirt.model.evidence import Evidence
from gpuvirt.model.findings import Finding, FindingCode, Level, Seen, fine, unread
from gpuvirt.model.settings import CdiUse

OUR_FOLDERS = frozenset({"/run/cdi", "/var/run/cdi"})
"""Where gpuvirt keeps its specs; one is a link to the other."""

TABLES = (
    ("plugins", "io.containerd.cri.v1.runtime"),
    ("plugins", "io.containerd.grpc.v1.cri"),
    ("crio", "runtime"),
)
"""Where the settings stand: containerd 2, containerd 1, CRI-O."""


def container_cdi(evidence: Evidence) -> Iterator[Finding]:
    """Container runtimes have CDI on, and read gpuvirt's folder."""
    if evidence.settings.cdi is CdiUse.NONE:
        return
    for file in evidence.setup.runtimes:
        if isinstance(file.value, Unread):
            yield unread("the container runtime's configuration", "could not be read", file)
            continue
        settings = cdi_settings(file.text or "")
        if settings is None:
            yield unread("the container runtime's configuration", "is no TOML", Attribute(file.path, "not TOML"))
        else:
            yield from _of_runtime(evidence, file.path, settings)


def cdi_settings(text: str) -> Mapping[str, object] | None:
    """Return `version`, `enable_cdi` and `cdi_spec_dirs` of a runtime's configuration; None for what is no TOML."""
    try:
        # Brackets in brackets are read by functions that call themselves.
        document: Mapping[str, object] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None
    found: dict[str, object] = {"version": document.get("version", 1)}
    for path in TABLES:
        table: object = document
        for name in path:
            table = table.get(name) if isinstance(table, Mapping) else None
        if isinstance(table, Mapping):
            found |= {name: table[name] for name in ("enable_cdi", "cdi_spec_dirs") if name in table}
    return found


def _of_runtime(evidence: Evidence, path: str, settings: Mapping[str, object]) -> Iterator[Finding]:
    version, enabled, folders = settings["version"], settings.get("enable_cdi"), settings.get("cdi_spec_dirs")
    containerd = path.endswith("config.toml")
    needed = evidence.settings.cdi is CdiUse.ANSWERS
    table = '[plugins."io.containerd.grpc.v1.cri"]' if version != 3 else '[plugins."io.containerd.cri.v1.runtime"]'
    off = enabled is False or (enabled is None and containerd and version != 3)
    unread_by = isinstance(folders, list) and not OUR_FOLDERS & {one for one in folders if isinstance(one, str)}
    if needed and off:
        value = "enable_cdi = false" if enabled is False else f"version = {version}, no enable_cdi"
        yield Finding(
            Level.ERROR,
            "containerd",
            "has CDI switched off, and answers to the kubelet name CDI devices",
            FindingCode.CDI_OFF,
            (Seen(path, value),),
            why="pods with our devices don't start: the runtime does not know the names (setting cdi: answers)",
            fix=(
                f"# in {path}",
                table,
                "  enable_cdi = true",
                "systemctl restart containerd",
                "or cdi: files in gpuvirt's settings",
            ),
        )
    elif needed and unread_by:
        yield Finding(
            Level.ERROR,
            "the container runtime",
            "does not look for CDI specs where gpuvirt keeps them",
            FindingCode.CDI_FOLDER_NOT_READ,
            (Seen(path, f"cdi_spec_dirs = {folders}"[:200]),),
            why="pods with our devices don't start: the runtime does not know the names",
            fix=(f'# in {path}: cdi_spec_dirs = ["/etc/cdi", "/run/cdi"]', "and restart the runtime"),
        )
    else:
        told = "is not asked for CDI: KubeVirt and Kata take our devices without" if not needed else "has CDI on"
        yield fine(
            "the container runtime", told, Seen(path, f"enable_cdi: {enabled if enabled is not None else 'default'}")
        )
