"""Generates the CustomResourceDefinitions of gpuvirt's kinds; with --check, reports stale ones."""

import sys
from pathlib import Path

import clusterpolicycrd
import gpunodecrd
import vgpuschedulecrd

FOLDER = Path(__file__).parent.parent / "deploy"
CRDS = (gpunodecrd.CRD, clusterpolicycrd.CRD, vgpuschedulecrd.CRD)


def main() -> int:
    """Generate the files, or compare them."""
    stale = 0
    for crd in CRDS:
        file, text = FOLDER / crd.file, crd.manifest()
        if "--check" not in sys.argv[1:]:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            print(f"{crd.file} is not up to date; run make generate", file=sys.stderr)
            stale += 1
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
