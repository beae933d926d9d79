"""CDI specs: the parts by which runtimes find devices, and the rules by which Kata's runtime in Go refuses a spec.

Source: tags.cncf.io/container-device-interface, SPEC.md, and of the rules beyond it that runtime's library,
github.com/container-orchestrated-devices/container-device-interface v0.6.0, pkg/cdi. The test ring `kata` compares
them with the library. Annotations are not checked.
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import msgspec

from gpuvirt import nulls, plain
from gpuvirt.errors import ConfigError

Version = tuple[int, int, int]
_VERSION = re.compile(r"v?([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})")
_KIND = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,250}[A-Za-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,250}[A-Za-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.:]{0,250}[A-Za-z0-9])?")


class CdiSpec(msgspec.Struct, frozen=True):
    """One spec."""

    version: str
    kind: str
    devices: tuple[str, ...]

    @property
    def numbers(self) -> Version:
        """The version as numbers."""
        return version_of(self.version) or (0, 0, 0)


def version_of(text: str) -> Version | None:
    """Return a version as numbers, None for another text."""
    found = _VERSION.fullmatch(text)
    return (int(found[1]), int(found[2]), int(found[3])) if found is not None else None


def parse_spec(text: str) -> CdiSpec | None:
    """Return a spec (JSON or YAML), None if it is not valid."""
    try:
        document = plain.read(text, where="spec").content
    except ConfigError:
        return None
    if not isinstance(document, dict):
        return None
    version, kind, devices = (document.get(key) for key in ("cdiVersion", "kind", "devices"))
    if not (isinstance(version, str) and version_of(version) and isinstance(kind, str) and _KIND.fullmatch(kind)):
        return None
    if not isinstance(devices, list) or not devices:
        return None
    names = [device.get("name") if isinstance(device, dict) else None for device in devices]
    named = [name for name in names if isinstance(name, str) and _NAME.fullmatch(name)]
    return CdiSpec(version, kind, tuple(named)) if len(named) == len(names) else None


VERSIONS = tuple((0, minor, 0) for minor in range(1, 7))
HOOKS = frozenset(
    {"prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"},
)
TYPES = frozenset({"", "b", "c", "u", "p"})


class _Part(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A part of a spec: the library refuses fields that it does not know."""


class _Node(_Part, frozen=True):
    path: str = ""
    host_path: str = ""
    type: str = ""
    major: int = 0
    minor: int = 0
    file_mode: int | None = None
    permissions: str = ""
    uid: int | None = None
    gid: int | None = None


class _Mount(_Part, frozen=True):
    host_path: str = ""
    container_path: str = ""
    options: list[str] = []
    type: str = ""


class _Hook(_Part, frozen=True):
    hook_name: str = ""
    path: str = ""
    args: list[str] = []
    env: list[str] = []
    timeout: int | None = None


class _Edits(_Part, frozen=True):
    env: list[str] = []
    device_nodes: list[_Node] = []
    hooks: list[_Hook] = []
    mounts: list[_Mount] = []

    @property
    def is_empty(self) -> bool:
        return not (self.env or self.device_nodes or self.hooks or self.mounts)


class _Device(_Part, frozen=True):
    name: str = ""
    annotations: dict[str, str] = {}
    container_edits: _Edits = msgspec.field(default_factory=_Edits)


class _Spec(_Part, frozen=True):
    cdi_version: str = ""
    kind: str = ""
    annotations: dict[str, str] = {}
    devices: list[_Device] = []
    container_edits: _Edits = msgspec.field(default_factory=_Edits)


def go_fault(text: str) -> str | None:
    """Return the first thing that the library refuses in a spec which `parse_spec` accepts; None without one."""
    try:
        document = plain.read(text, where="spec").content
        spec = msgspec.convert(nulls.removed(document, _Spec), _Spec)
    except (ConfigError, msgspec.ValidationError) as error:
        return str(error)
    return next(_faults(spec), None)


def has_edits(text: str) -> bool:
    """Return whether each device of a spec has edits, as the library demands."""
    try:
        document = plain.read(text, where="spec").content
        spec = msgspec.convert(nulls.removed(document, _Spec), _Spec, strict=False)
    except (ConfigError, msgspec.ValidationError):
        return False
    return not any(device.container_edits.is_empty for device in spec.devices)


def _faults(spec: _Spec) -> Iterator[str]:
    vendor, _, name = spec.kind.partition("/")
    version = version_of(spec.cdi_version)
    if version not in VERSIONS:
        yield f"$.cdiVersion: there is no version {spec.cdi_version}"
    elif version < (needed := _needed(spec, name)):
        yield f"$.cdiVersion: {spec.cdi_version}, and its fields need {'.'.join(map(str, needed))}"
    for part in (vendor, name):
        if len(part) == 1:
            yield f"$.kind: {spec.kind}, and the runtime ends at a vendor or a class of one letter"
        if not part[:1].isalpha():
            yield f"$.kind: {spec.kind}, expected a letter at the beginning of vendor and class"
    yield from _of_edits("$", spec.container_edits)
    for device in spec.devices:
        if device.container_edits.is_empty:
            yield f"$.devices[{device.name}].containerEdits: empty"
        yield from _of_edits(f"$.devices[{device.name}]", device.container_edits)
    yield from (
        f"$.devices: {name} twice"
        for name, count in Counter(device.name for device in spec.devices).items()
        if count > 1
    )


def _needed(spec: _Spec, name: str) -> tuple[int, int, int]:
    """Return the version whose fields a spec uses."""
    edits = (spec.container_edits, *(device.container_edits for device in spec.devices))
    if spec.annotations or any(device.annotations for device in spec.devices) or "." in name:
        return 0, 6, 0
    if any(not device.name[:1].isalpha() for device in spec.devices):
        return 0, 5, 0
    if any(node.host_path for node in chain.from_iterable(part.device_nodes for part in edits)):
        return 0, 5, 0
    has_types = any(mount.type for mount in chain.from_iterable(part.mounts for part in edits))
    return (0, 4, 0) if has_types else VERSIONS[0]


def _of_edits(place: str, edits: _Edits) -> Iterator[str]:
    at = f"{place}.containerEdits"
    for variable in chain(edits.env, *(hook.env for hook in edits.hooks)):
        if "=" not in variable[1:]:
            yield f"{at}: a variable without a name or a value"
    for node in edits.device_nodes:
        if not node.path or node.type not in TYPES or set(node.permissions) - set("rwm"):
            yield f"{at}.deviceNodes: path {node.path!r}, type {node.type!r}, permissions {node.permissions!r}"
    for hook in edits.hooks:
        if hook.hook_name not in HOOKS or not hook.path:
            yield f"{at}.hooks: hookName {hook.hook_name!r}, path {hook.path!r}"
    for mount in edits.mounts:
        if not (mount.host_path and mount.container_path):
            yield f"{at}.mounts: hostPath {mount.host_path!r}, containerPath {mount.container_path!r}"
