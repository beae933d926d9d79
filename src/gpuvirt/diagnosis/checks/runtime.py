"""Checks of container runtimes: whether they apply the CDI devices that gpuvirt's answers to the kubelet name."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from gpuvirt.diagnosis.evidence import Evidence
from gpuvirt.diagnosis.findings import Finding, fine, of_reason, problem, unread
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute
from gpuvirt.facts.runtimes import CDI_KEYS, CDI_TABLES, Runtime, cdi_tables, parse_toml
from gpuvirt.model.desired.enforcement import of_settings
from gpuvirt.model.desired.settings import CdiUse
from gpuvirt.model.reasons import FindingCode, Seen
from gpuvirt.model.reasons.codes import Level
from gpuvirt.model.reasons.sharing import NoLimit, limit_not_possible
from gpuvirt.model.shares.node import driverlimit

OUR_FOLDERS = frozenset({"/run/cdi", "/var/run/cdi"})
"""The folder of gpuvirt's CDI specs by both of its names; `/var/run` is a link to `/run`."""

CDI_BY_DEFAULT = 3
"""The first version of containerd's configuration that only versions read in which CDI is on by default.

containerd 2 also reads configurations of version 2, of containerd 1, and has CDI on then (`containerd config dump` of
2.3.7). No file says which of both runs."""


class CdiSettings(msgspec.Struct, frozen=True):
    """The CDI settings in all configuration files of a runtime."""

    version: object
    of_containerd: bool
    enabled: object = None
    folders: object = None
    path: str = ""
    """The file with the value that counts."""

    @property
    def is_off(self) -> bool:
        """Whether CDI is off."""
        off_by_default = self.enabled is None and self.of_containerd and not self.on_by_default
        return self.enabled is False or off_by_default

    @property
    def on_by_default(self) -> bool:
        """Whether CDI is on without a setting, whichever version of containerd it is."""
        return isinstance(self.version, int) and self.version >= CDI_BY_DEFAULT


def container_cdi(evidence: Evidence) -> Iterator[Finding]:
    """Container runtimes have CDI on, and read gpuvirt's CDI specs."""
    if evidence.settings.cdi is CdiUse.NONE and not evidence.shares_gpus:
        return
    for runtime in evidence.setup.runtimes:
        if unknown := list(_unreadable_files(runtime)):
            yield from unknown
        else:
            yield from _of_runtime(evidence, runtime)


def share_limits(evidence: Evidence) -> Iterator[Finding]:
    """Without an agent, whose reasons each shared GPU has: NVIDIA's driver limits shares where the settings ask it."""
    settings = evidence.settings
    if not evidence.shares_gpus or not settings.shares.enforcement.has_driver or evidence.view.agent is not None:
        return
    platform = evidence.inventory.facts.platform
    found, unlimited = driverlimit.effective(of_settings(settings), settings.shares.otherwise, platform)
    if unlimited is not None:
        reason = limit_not_possible("the memory of shared GPUs", NoLimit.DRIVER, unlimited)
        yield of_reason(reason, Level.ERROR)
    elif found is not None:
        yield fine("the shares of GPUs", f"are limited by {found.value}", Seen("", found.source.where))


def _unreadable_files(runtime: Runtime) -> Iterator[Finding]:
    for file in runtime.files:
        if isinstance(file.value, Unread):
            yield unread("the container runtime's configuration", "could not be read", file)
        elif parse_toml(file.text or "") is None:
            yield unread("the container runtime's configuration", "is not valid TOML", Attribute(file.path, "not TOML"))


def cdi_settings(files: Sequence[tuple[str, str]], *, replacing: bool) -> CdiSettings:
    """Return the CDI settings in files, each a path and its TOML; a later file overrides an earlier one.

    `replacing`: a table of a later file replaces the whole table of an earlier one, as in containerd 1 (mergeConfig in
    services/server/config); recent containerd 2 merges tables key by key.
    """
    version: object = None
    tables: dict[tuple[str, ...], dict[str, tuple[object, str]]] = {}
    for path, text in files:
        document = parse_toml(text) or {}
        version = document.get("version", 1) if version is None else version
        for name, table in cdi_tables(document):
            values = {key: (table[key], path) for key in CDI_KEYS if key in table}
            tables[name] = values if replacing else tables.get(name, {}) | values
    found = {key: value for name in CDI_TABLES for key, value in tables.get(name, {}).items()}
    (enabled, source), (folders, _) = (found.get(key, (None, files[0][0])) for key in CDI_KEYS)
    return CdiSettings(version, files[0][0].endswith("config.toml"), enabled, folders, source)


def _of_runtime(evidence: Evidence, runtime: Runtime) -> Iterator[Finding]:
    files = [(file.path, file.text or "") for file in runtime.files]
    settings, merged = (cdi_settings(files, replacing=replacing) for replacing in (True, False))
    folders = settings.folders
    needed = evidence.settings.cdi is CdiUse.ANSWERS or evidence.shares_gpus
    not_read = isinstance(folders, list) and not OUR_FOLDERS & {path for path in folders if isinstance(path, str)}
    shown = Seen(settings.path, f"enable_cdi: {settings.enabled if settings.enabled is not None else 'default'}")
    if not needed:
        yield fine("the container runtime", "needs no CDI: KubeVirt and Kata get gpuvirt's devices without it", shown)
    elif settings.is_off or merged.is_off:
        yield _off(runtime, settings, merged, shares=evidence.shares_gpus)
    elif not_read:
        yield problem(
            FindingCode.CDI_FOLDER_NOT_READ,
            "the container runtime",
            "does not read the folder with gpuvirt's CDI specs",
            (Seen(_folders_in(files), f"cdi_spec_dirs = {folders}"[:200]),),
            why="pods with gpuvirt's devices don't start: the runtime can't find the CDI devices",
            fix=(
                f'# in {_folders_in(files)}: cdi_spec_dirs = ["/etc/cdi", "/run/cdi"]',
                "and restart the runtime",
            ),
        )
    else:
        yield fine("the container runtime", "has CDI on", shown)


def _folders_in(files: Sequence[tuple[str, str]]) -> str:
    """Return the last file that sets `cdi_spec_dirs`."""
    documents = ((path, parse_toml(text) or {}) for path, text in files)
    found = [path for path, content in documents if any("cdi_spec_dirs" in table for _, table in cdi_tables(content))]
    return found[-1] if found else files[0][0]


def _off(runtime: Runtime, settings: CdiSettings, merged: CdiSettings, *, shares: bool) -> Finding:
    by_default = settings.enabled is None and merged.enabled is None
    certain = settings.is_off and merged.is_off and not by_default
    shown = settings if settings.is_off else merged
    missing = f"version = {shown.version}, no enable_cdi"
    places = [Seen(shown.path, "enable_cdi = false" if shown.enabled is False else missing)]
    if not certain and not by_default:
        enabling = (reading for reading in (settings, merged) if reading.enabled is True)
        places += [Seen(reading.path, "enable_cdi = true") for reading in enabling]
        places += [Seen(file.path, _tables_of(file)) for file in runtime.files[1:] if file.path != shown.path]
    table = (
        '[plugins."io.containerd.cri.v1.runtime"]' if shown.on_by_default else '[plugins."io.containerd.grpc.v1.cri"]'
    )
    return problem(
        FindingCode.CDI_OFF,
        "containerd",
        "has CDI disabled, but gpuvirt's answers to the kubelet name CDI devices"
        if certain
        else "has CDI off if it is older than 2.0, and on otherwise: its configuration does not say"
        if by_default
        else "has CDI on or off by its version: some versions replace a whole table by that of an imported file",
        tuple(places),
        why="pods with gpuvirt's devices don't start: the runtime can't find the CDI devices"
        f" ({'GPUs in mode shared' if shares else 'setting cdi: answers'})",
        fix=(
            f"# in {shown.path if certain or by_default else runtime.files[-1].path}",
            table,
            "  enable_cdi = true",
            "systemctl restart containerd",
            "or set mode container for these GPUs" if shares else "or set cdi: files in gpuvirt's settings",
        ),
        level=Level.ERROR if certain else Level.WARNING,
    )


def _tables_of(file: Attribute) -> str:
    document: Mapping[str, object] = parse_toml(file.text or "") or {}
    return ", ".join(f"[{'.'.join(path)}]" for path, _ in cdi_tables(document)) or "no table with CDI settings"
