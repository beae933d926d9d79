"""Reads the configurations of Kata's runtimes, and the CDI specs of a host.

A handler names Kata's configuration, or Kata takes the first of its default paths that exists. Files of the folder
`config.d` beside it are merged over it, sorted by name (`src/libs/kata-types/src/config/drop_in.rs` and
`src/runtime/pkg/katautils/config.go`, Kata 4.1.0).
"""

from collections.abc import Iterable, Iterator
from posixpath import dirname, normpath

from gpuvirt import plain
from gpuvirt.facts.cdirules import has_edits
from gpuvirt.facts.cdispecs import parse_spec
from gpuvirt.facts.kata import RUST, Handler, KataRuntime, kata_handlers
from gpuvirt.facts.platform import Attribute, Listing
from gpuvirt.facts.runtimes import Runtime, parse_toml
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.attributes import read_attribute, read_listing
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.host.runtimes import ACTING, LEFT_OUT, MOST_FILES
from gpuvirt.plain import Plain

FOLDERS = ("/etc/kata-containers", "/usr/share/defaults/kata-containers", "/opt/kata/share/defaults/kata-containers")
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
    usual = [f"{folder}{below}/configuration.toml" for folder in FOLDERS]
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
