"""Regenerates src/gpuvirt/model/inventory/data/pci.ids from the crate `pci-ids`, which is pinned by version and digest.

Resource names come from this file, and VM manifests contain resource names. So a newer file may only come with a
release whose changelog says so.
"""

import hashlib
import io
import re
import sys
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

VERSION = "0.2.6"
SHA256 = "098762dc8ca11c831fee9544ae9f7eae8fc4666ec37e7b753f56d624c03d725e"
URL = f"https://static.crates.io/crates/pci-ids/pci-ids-{VERSION}.crate"
TARGET = Path(__file__).parent.parent / "src/gpuvirt/model/inventory/data/pci.ids"

VENDORS = frozenset({"10de", "1002"})
"""Vendors whose ids are all taken: their other functions (audio, USB, NVSwitch) are beside GPUs."""
INTEL_GPUS = re.compile(
    r"graphics|\bgpu\b|\barc\b|\biris\b|\bxe\b|\bdg[12]\b|ponte vecchio|display|accelerator", re.IGNORECASE
)


def main() -> int:
    """Download the crate, verify it, and write the filtered ids."""
    with urllib.request.urlopen(URL) as answer:
        crate: bytes = answer.read()
    if (digest := hashlib.sha256(crate).hexdigest()) != SHA256:
        print(f"{URL}: expected sha256 {SHA256}, got {digest}", file=sys.stderr)
        return 1
    with tarfile.open(fileobj=io.BytesIO(crate)) as archive:
        member = archive.extractfile(f"pci-ids-{VERSION}/pciids/pci.ids")
        if member is None:
            print(f"{URL}: contains no pciids/pci.ids", file=sys.stderr)
            return 1
        text = member.read().decode()
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text("\n".join(excerpt(text)) + "\n", encoding="utf-8")
    print(f"{TARGET}: {sum(line.startswith(chr(9)) for line in TARGET.read_text('utf-8').splitlines())} ids")
    return 0


def excerpt(text: str) -> Iterator[str]:
    """Yield the head of the file, and the vendors and devices that gpuvirt can encounter."""
    version = re.search(r"^#\tVersion: (\S+)$", text, re.MULTILINE)
    yield "# GPUs, and what sits beside them, from the PCI ID database (https://pci-ids.ucw.cz/)"
    yield f"# Version: {version[1] if version else 'unknown'}, by way of the crate pci-ids {VERSION}"
    yield "# Copyright: Martin Mares and Albert Pool; used under the 3-clause BSD License, see LICENSE.pci-ids"
    vendor = ""
    for line in text.splitlines():
        if re.match(r"[0-9a-f]{4}  ", line):
            vendor = line[:4]
            if vendor in VENDORS or vendor == "8086":
                yield line
        elif re.match(r"\t[0-9a-f]{4}  ", line):
            if vendor in VENDORS or (vendor == "8086" and INTEL_GPUS.search(line)):
                yield line
        elif line and not line.startswith(("#", "\t")):
            vendor = ""


if __name__ == "__main__":
    sys.exit(main())
