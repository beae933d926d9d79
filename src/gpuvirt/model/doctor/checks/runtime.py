"""Checks of container runtimes: whether they give pods the CDI devices that an answer names."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute
from gpuvirt.facts.runtimes import CDI_KEYS, CDI_TABLES, Runtime, cdi_tables, parse_toml
from gpuvirt.model.desired.settings import CdiUse
from gpuvirt.model.doctor.evidence import Evidence
from gpuvirt.model.doctor.findings import Finding, fine, problem, unread
from gpuvirt.model.reasons import FindingCode, Seen
from gpuvirt.model.reasons.codes import Level

OUR_FOLDERS = frozenset({"/run/cdi", "/var/run/cdi"})
"""Where gpuvirt keeps its specs; one is a link to the other."""

CDI_UNASKED = 3
"""The version of a containerd configuration from which on CDI is on unless it is switched off."""


@dataclass(frozen=True, slots=True)
class CdiSettings:
    """What a runtime's files together say of CDI."""

    version: object
    of_containerd: bool
    enabled: object = None
    folders: object = None
    path: str = ""
    """The file that decides."""

    @property
    def is_off(self) -> bool:
        """Whether CDI is off."""
        unasked = self.enabled is None and self.of_containerd and not self.on_unasked
        return self.enabled is False or unasked

    @property
    def on_unasked(self) -> bool:
        """Whether CDI is on where nothing is said."""
        return isinstance(self.version, int) and self.version >= CDI_UNASKED


def container_cdi(evidence: Evidence) -> Iterator[Finding]:
    """Container runtimes have CDI on, and read gpuvirt's folder."""
    if evidence.settings.cdi is CdiUse.NONE:
        return
    for runtime in evidence.setup.runtimes:
        if unknown := list(_not_understood(runtime)):
            yield from unknown
        else:
            yield from _of_runtime(evidence, runtime)


def _not_understood(runtime: Runtime) -> Iterator[Finding]:
    for file in runtime.files:
        if isinstance(file.value, Unread):
            yield unread("the container runtime's configuration", "could not be read", file)
        elif parse_toml(file.text or "") is None:
            yield unread("the container runtime's configuration", "is no TOML", Attribute(file.path, "not TOML"))


def cdi_settings(files: Sequence[tuple[str, str]], *, replacing: bool) -> CdiSettings:
    """Return what files say of CDI, each a path and its TOML; a later file counts more than an earlier one.

    `replacing`: a table of a later file stands in place of an earlier one's as a whole, as containerd 1 has it
    (mergeConfig in services/server/config); recent containerd 2 merges them key by key.
    """
    version: object = None
    tables: dict[tuple[str, ...], dict[str, tuple[object, str]]] = {}
    for path, text in files:
        document = parse_toml(text) or {}
        version = document.get("version", 1) if version is None else version
        for name, table in cdi_tables(document):
            said = {key: (table[key], path) for key in CDI_KEYS if key in table}
            tables[name] = said if replacing else tables.get(name, {}) | said
    found = {key: value for name in CDI_TABLES for key, value in tables.get(name, {}).items()}
    (enabled, said_in), (folders, _) = (found.get(key, (None, files[0][0])) for key in CDI_KEYS)
    return CdiSettings(version, files[0][0].endswith("config.toml"), enabled, folders, said_in)


def _of_runtime(evidence: Evidence, runtime: Runtime) -> Iterator[Finding]:
    files = [(file.path, file.text or "") for file in runtime.files]
    settings, merged = (cdi_settings(files, replacing=one) for one in (True, False))
    folders = settings.folders
    needed = evidence.settings.cdi is CdiUse.ANSWERS
    unread_by = isinstance(folders, list) and not OUR_FOLDERS & {one for one in folders if isinstance(one, str)}
    shown = Seen(settings.path, f"enable_cdi: {settings.enabled if settings.enabled is not None else 'default'}")
    if not needed:
        yield fine("the container runtime", "is not asked for CDI: KubeVirt and Kata take our devices without", shown)
    elif settings.is_off or merged.is_off:
        yield _off(runtime, settings, merged)
    elif unread_by:
        yield problem(
            FindingCode.CDI_FOLDER_NOT_READ,
            "the container runtime",
            "does not look for CDI specs where gpuvirt keeps them",
            (Seen(_folders_in(files), f"cdi_spec_dirs = {folders}"[:200]),),
            why="pods with our devices don't start: the runtime does not know the names",
            fix=(
                f'# in {_folders_in(files)}: cdi_spec_dirs = ["/etc/cdi", "/run/cdi"]',
                "and restart the runtime",
            ),
        )
    else:
        yield fine("the container runtime", "has CDI on", shown)


def _folders_in(files: Sequence[tuple[str, str]]) -> str:
    """Return the last file that says which folders are read."""
    documents = ((path, parse_toml(text) or {}) for path, text in files)
    found = [path for path, one in documents if any("cdi_spec_dirs" in table for _, table in cdi_tables(one))]
    return found[-1] if found else files[0][0]


def _off(runtime: Runtime, settings: CdiSettings, merged: CdiSettings) -> Finding:
    certain = settings.is_off and merged.is_off
    shown = settings if settings.is_off else merged
    missing = f"version = {shown.version}, no enable_cdi"
    places = [Seen(shown.path, "enable_cdi = false" if shown.enabled is False else missing)]
    if not certain:
        said = (one for one in (settings, merged) if one.enabled is True)
        places += [Seen(one.path, "enable_cdi = true") for one in said]
        places += [Seen(file.path, _tables_of(file)) for file in runtime.files[1:] if file.path != shown.path]
    table = '[plugins."io.containerd.cri.v1.runtime"]' if shown.on_unasked else '[plugins."io.containerd.grpc.v1.cri"]'
    return problem(
        FindingCode.CDI_OFF,
        "containerd",
        "has CDI switched off, and answers to the kubelet name CDI devices"
        if certain
        else "has CDI on or off by its version: some take an imported file's table in place of the whole one before it",
        tuple(places),
        why="pods with our devices don't start: the runtime does not know the names (setting cdi: answers)",
        fix=(
            f"# in {runtime.files[-1].path if not certain else shown.path}",
            table,
            "  enable_cdi = true",
            "systemctl restart containerd",
            "or cdi: files in gpuvirt's settings",
        ),
        level=Level.ERROR if certain else Level.WARNING,
    )


def _tables_of(file: Attribute) -> str:
    document: Mapping[str, object] = parse_toml(file.text or "") or {}
    return ", ".join(f"[{'.'.join(path)}]" for path, _ in cdi_tables(document)) or "no table of CDI"
