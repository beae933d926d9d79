"""The configurations (TOML) of container runtimes and of Kata's, with CDI's settings and Kata's handlers."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gpuvirt.facts.platform import Attribute

CDI_TABLES = (
    ("plugins", "io.containerd.cri.v1.runtime"),
    ("plugins", "io.containerd.grpc.v1.cri"),
    ("crio", "runtime"),
)
"""The tables with CDI's settings: of containerd 2, containerd 1 and CRI-O."""

CDI_KEYS = ("enable_cdi", "cdi_spec_dirs")


class Runtime(msgspec.Struct, frozen=True):
    """One runtime's files in the order in which it loads them: the main file, then the files that it imports."""

    files: tuple[Attribute, ...]

    @property
    def own(self) -> Attribute:
        """The main file, which names all others."""
        return self.files[0]


def toml_or_fault(text: str) -> Mapping[str, object] | str:
    """Return a TOML document, or why the text is none, with line and column."""
    try:
        # tomllib parses nested brackets recursively.
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return str(error)
    except RecursionError:
        return "its brackets are nested too deeply"


def parse_toml(text: str) -> Mapping[str, object] | None:
    """Return a TOML document, None if the text is not TOML."""
    found = toml_or_fault(text)
    return None if isinstance(found, str) else found


def cdi_tables(document: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], Mapping[str, object]]]:
    """Yield the tables of a document that may have CDI's settings, with their paths."""
    for path in CDI_TABLES:
        table: object = document
        for name in path:
            table = table.get(name) if isinstance(table, Mapping) else None
        if isinstance(table, Mapping):
            yield path, table


def enables_cdi(runtimes: Iterable[Runtime]) -> bool | None:
    """Return the setting `enable_cdi` of the runtimes' configurations, None where none has it; the last file counts."""
    files = (file for runtime in runtimes for file in runtime.files)
    tables = (table for file in files for _, table in cdi_tables(parse_toml(file.text or "") or {}))
    found = [table["enable_cdi"] for table in tables if isinstance(table.get("enable_cdi"), bool)]
    return bool(found[-1]) if found else None


HANDLER_TABLES = (
    ("plugins", "io.containerd.cri.v1.runtime", "containerd", "runtimes"),
    ("plugins", "io.containerd.grpc.v1.cri", "containerd", "runtimes"),
    ("crio", "runtime", "runtimes"),
)
"""The tables of handlers: of containerd 2, containerd 1 and CRI-O."""
SETTINGS = ("cold_plug_vfio", "hot_plug_vfio", "pcie_root_port", "vfio_mode", "pod_resource_api_sock")
"""Kata's settings for devices: of `[hypervisor.*]` and `[runtime]`."""
_TYPE = re.compile(r"io\.containerd\.kata[-a-z0-9.]{0,64}|vm")
_NAME = re.compile(r"[-A-Za-z0-9_.]{1,64}")
_BARE = re.compile(r"[-A-Za-z0-9_]+")
_SECTION = re.compile(r"runtime|hypervisor\.[a-z0-9-]{1,32}")
RUST = "runtime-rs"
"""A part of each path of the runtime in Rust, as kata-deploy and distributions install it."""


class Handler(msgspec.Struct, frozen=True):
    """A handler of a container runtime's configuration that starts Kata."""

    name: str
    table: str
    """Its table in the configuration, as TOML writes it."""
    type: str
    """The type of the runtime: `io.containerd.kata-qemu.v2`, or CRI-O's `vm`."""
    shim: str
    """The path of Kata's shim; empty where it is found by the type of the runtime."""
    config: str
    """The path of Kata's configuration; empty: Kata's default."""

    @property
    def is_rust(self) -> bool:
        """Whether it is the runtime in Rust, the default since Kata 4.0; the other one is in Go."""
        return RUST in self.shim or RUST in self.config


class KataRuntime(msgspec.Struct, frozen=True):
    """A handler with the files of its configuration, in the order in which Kata merges them."""

    handler: Handler
    files: tuple[Attribute, ...]

    @property
    def documents(self) -> Iterator[tuple[str, Mapping[str, object]]]:
        """The readable files, each with its path."""
        found = ((file.path, parse_toml(file.text)) for file in self.files if file.text is not None)
        return ((path, document) for path, document in found if document is not None)

    def setting(self, section: str, key: str) -> tuple[object, str]:
        """Return a setting of `[runtime]` or `[hypervisor.*]` with the file that has it; the last file counts.

        A setting that no file has is None, with the path of the first file.
        """
        value: object = None
        where = self.files[0].path if self.files else self.handler.config
        for path, document in self.documents:
            for table in _tables(document.get(section), section):
                if key in table:
                    value, where = table[key], path
        return value, where


def _tables(found: object, section: str) -> Iterator[Mapping[str, object]]:
    if not isinstance(found, Mapping):
        return
    if section == "hypervisor":  # [hypervisor.qemu]: a table for the one hypervisor of the configuration
        yield from (table for table in found.values() if isinstance(table, Mapping))
    else:
        yield found


def kata_handlers(document: Mapping[str, object]) -> Iterator[Handler]:
    """Yield the handlers of a container runtime's configuration that start Kata.

    containerd has them in `[plugins.*.containerd.runtimes.NAME]`, CRI-O in `[crio.runtime.runtimes.NAME]` with the type
    `vm`.
    """
    for keys in HANDLER_TABLES:
        found: object = document
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        for name, table in found.items() if isinstance(found, Mapping) else ():
            is_kata = isinstance(table, Mapping) and _TYPE.fullmatch(_text(table.get("runtime_type")))
            if is_kata and _NAME.fullmatch(name):
                yield _handler((*keys, name), table)


def _handler(keys: tuple[str, ...], table: Mapping[str, object]) -> Handler:
    options = table.get("options")
    config = options.get("ConfigPath") if isinstance(options, Mapping) else table.get("runtime_config_path")
    written = ".".join(key if _BARE.fullmatch(key) else f'"{key}"' for key in keys)
    return Handler(keys[-1], written, _text(table["runtime_type"]), _text(table.get("runtime_path")), _text(config))


def kata_settings(document: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the tables of Kata's configuration that have settings for devices, with these settings alone."""
    hypervisors = document.get("hypervisor")
    named = hypervisors.items() if isinstance(hypervisors, Mapping) else ()
    tables = (*((f"hypervisor.{name}", table) for name, table in named), ("runtime", document.get("runtime")))
    for section, table in tables:
        if not isinstance(table, Mapping) or not _SECTION.fullmatch(section):
            continue
        if settings := {key: table[key] for key in SETTINGS if key in table}:
            yield section, settings


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
