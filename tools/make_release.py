"""Makes dist/: what a release consists of, or with `bundle` what a cluster without internet access needs.

A release has wheels and sdists of the three distributions, the chart's package, the image as a docker archive, an SBOM
and checksums. A bundle is one tar of wheels with all that they require, for this Python and architecture, the chart's
package and the image. Builders come from the package index.
"""

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from sbom import sbom

from gpuvirt import __version__

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
CHART = ROOT / "deploy/chart"
DISTRIBUTIONS = (".", "schedules", "simulator")
IMAGE = f"gpuvirt-{__version__}-image.tar"
PACKAGE = f"gpuvirt-{__version__}.tgz"
"""The chart's package, by the name that `helm package` gives it."""
BUNDLE = f"gpuvirt-{__version__}-bundle"
SUMS = "SHA256SUMS"
RUN = ("./schedules[vsphere]", "./simulator")
"""The distributions of a bundle, beside gpuvirt. libvirt-python has no wheels; the image has it."""


def python_with(folder: Path, *requirements: str) -> Path:
    """Return a Python of its own in `folder` that has pip and these distributions."""
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    if requirements:
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements)
    return python


def make_distributions(folder: Path) -> None:
    """Write a wheel and an sdist of each distribution to `folder`."""
    with tempfile.TemporaryDirectory() as work:
        python = python_with(Path(work), "hatchling>=1.27")
        for name in DISTRIBUTIONS:
            run(python, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", folder, cwd=ROOT / name)


def make_wheels(folder: Path) -> None:
    """Write wheels of all distributions and of what they require to `folder`, in the versions that this tree pins."""
    with tempfile.TemporaryDirectory() as work:
        options = ("--quiet", "--disable-pip-version-check", "--constraint", "constraints.txt", "--wheel-dir", folder)
        run(python_with(Path(work)), "-m", "pip", "wheel", *options, ".", *RUN)


def make_package(folder: Path) -> None:
    """Write the chart's package, which is the same for the same files."""
    with gzip.GzipFile(folder / PACKAGE, "wb", mtime=0) as file, tarfile.open(fileobj=file, mode="w") as package:
        for path in sorted(CHART.rglob("*")):
            if path.is_file():
                package.add(path, Path("gpuvirt") / path.relative_to(CHART), filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry


def make_image() -> Path:
    """Build the image as dist/'s docker archive, with the options of the command line."""
    environment = {name: value for name, value in os.environ.items() if name != "REGISTRY"}  # noqa: TID251
    run(ROOT / "tools/make-image", *sys.argv[2:], environment=environment)
    return DIST / IMAGE


def write_sums(folder: Path) -> None:
    """Write the SHA-256 of each file of `folder`, as sha256sum does."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    lines = (f"{_sha256(path)}  {path.relative_to(folder)}\n" for path in files)
    (folder / SUMS).write_text("".join(lines))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run(*command: Path | str, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> None:
    """Run a program, and end with its exit code if it fails."""
    if (code := subprocess.run(command, cwd=cwd, env=environment, check=False).returncode) != 0:
        sys.exit(code)


def release() -> None:
    """Empty dist/, and fill it."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    image = make_image()
    make_distributions(DIST)
    make_package(DIST)
    (DIST / f"gpuvirt-{__version__}.cdx.json").write_bytes(sbom(image))
    write_sums(DIST)


def bundle() -> None:
    """Make the bundle's tar in dist/."""
    DIST.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DIST) as work:
        folder = Path(work) / BUNDLE
        folder.mkdir()
        make_wheels(folder / "wheels")
        make_package(folder)
        (folder / IMAGE).hardlink_to(make_image())
        write_sums(folder)
        with tarfile.open(DIST / f"{BUNDLE}.tar", "w") as archive:
            archive.add(folder, BUNDLE)


def main() -> None:
    """Make a release or a bundle, and list what dist/ has."""
    product: Sequence[str] = sys.argv[1:2]
    if product == ["release"]:
        release()
    elif product == ["bundle"]:
        bundle()
    else:
        sys.exit("usage: make_release.py release|bundle [BUILD OPTION...]")
    for path in sorted(DIST.iterdir()):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
