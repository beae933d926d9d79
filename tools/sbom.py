"""The SBOM of an image: its Python distributions and Debian packages, as CycloneDX 1.6.

Sources: cyclonedx.org/docs/1.6/json; the METADATA of Python's installed distributions; dpkg-query(1)'s status file.
"""

import re
import tarfile
import uuid
from collections.abc import Iterator
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from urllib.parse import quote

import msgspec

from gpuvirt import __version__

METADATA = re.compile(r"(?:.*/)?[^/]+\.dist-info/METADATA")
DPKG = "var/lib/dpkg/status"
NAME = re.compile(r"[A-Za-z0-9._-]+")


class LicenseExpression(msgspec.Struct, frozen=True):
    """A licence, as an expression of SPDX."""

    expression: str


class Component(msgspec.Struct, frozen=True, rename={"ref": "bom-ref"}, omit_defaults=True):
    """A package, or the image itself."""

    type: str
    ref: str
    name: str
    version: str
    purl: str = ""
    licenses: tuple[LicenseExpression, ...] = ()


class Layers(msgspec.Struct, frozen=True, rename="pascal"):
    """An image in a docker archive's manifest.json."""

    layers: tuple[str, ...]


class Dependency(msgspec.Struct, frozen=True, rename="camel"):
    """The components of the image that a component requires."""

    ref: str
    depends_on: tuple[str, ...]


class Metadata(msgspec.Struct, frozen=True):
    """The image that an SBOM is about."""

    component: Component


class Bom(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """An SBOM."""

    bom_format: str = "CycloneDX"
    spec_version: str = "1.6"
    serial_number: str
    version: int = 1
    metadata: Metadata
    components: tuple[Component, ...]
    dependencies: tuple[Dependency, ...]


def sbom(archive: Path) -> bytes:
    """Return the SBOM of a docker archive, which is the same for the same packages."""
    files = dict(_files(archive))
    found = (HeaderParser().parsestr(text) for name, text in sorted(files.items()) if METADATA.fullmatch(name))
    python = {_normalized(metadata["Name"]): metadata for metadata in found}
    components = (
        *(_of_python(name, metadata) for name, metadata in python.items()),
        *(_of_debian(stanza) for stanza in _installed(files.get(DPKG, ""))),
    )
    image = Component("container", "image", "gpuvirt", __version__)
    dependencies = (
        Dependency(image.ref, tuple(component.ref for component in components)),
        *(Dependency(name, tuple(sorted(_required(metadata) & python.keys()))) for name, metadata in python.items()),
    )
    # The serial number follows from the content, so that two builds can be compared.
    content = msgspec.json.encode((image, components, dependencies)).decode()
    serial = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, content)}"
    about = Metadata(image)
    bom = Bom(serial_number=serial, metadata=about, components=components, dependencies=dependencies)
    return msgspec.json.format(msgspec.json.encode(bom), indent=1)


def _files(archive: Path) -> Iterator[tuple[str, str]]:
    """Yield the files that list packages, by their paths; later layers come later."""
    with tarfile.open(archive) as tar:
        (image,) = msgspec.json.decode(_read(tar, "manifest.json"), type=tuple[Layers])
        for name in image.layers:
            with tarfile.open(fileobj=tar.extractfile(name)) as layer:
                for entry in layer:
                    path = entry.name.removeprefix("./")
                    if entry.isreg() and (path == DPKG or METADATA.fullmatch(path)):
                        yield path, _read(layer, entry).decode()


def _read(tar: tarfile.TarFile, entry: str | tarfile.TarInfo) -> bytes:
    file = tar.extractfile(entry)
    return b"" if file is None else file.read()


def _of_python(name: str, metadata: Message) -> Component:
    version, expression = metadata["Version"], metadata["License-Expression"]
    licenses = (LicenseExpression(expression),) if expression else ()
    return Component("library", name, metadata["Name"], version, f"pkg:pypi/{name}@{quote(version)}", licenses)


def _required(metadata: Message) -> set[str]:
    """Return the distributions that a distribution can require; an image has those of the extras that it installs."""
    return {_normalized(found[0]) for line in metadata.get_all("Requires-Dist", ()) if (found := NAME.match(line))}


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed(status: str) -> Iterator[Message]:
    for stanza in status.split("\n\n"):
        fields = HeaderParser().parsestr(stanza)
        if (fields["Status"] or "").endswith(" installed"):
            yield fields


def _of_debian(stanza: Message) -> Component:
    name, version, architecture = stanza["Package"], stanza["Version"], stanza["Architecture"]
    purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}"
    return Component("library", f"deb/{name}/{architecture}", name, version, purl)
