"""Debian's kernel, headers and samples, fetched with apt and unpacked into the cache without an installation."""

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lab.cache import once
from lab.kernel.errors import LabError

T = TypeVar("T")

META = "linux-image-amd64"
SAMPLES = "samples/vfio-mdev"

TAKE_SOURCE = 'dpkg --fsys-tarfile "$1" | tar -xO "./usr/src/$2.tar.xz" | tar -xJ -C "$3" --strip-components=1'
TAKE_SAMPLES = 'dpkg --fsys-tarfile "$1" | tar -xO "./usr/src/$2.tar.xz" | tar -xJ -C "$3" --strip-components=3 "$2/$4"'


@dataclass(frozen=True, slots=True)
class KernelPackages:
    """One version of the kernel's packages."""

    release: str
    """The output of `uname -r`: `6.1.0-56-amd64`."""
    version: str
    """The version of the packages: `6.1.192-2`."""

    @property
    def series(self) -> str:
        """The series, as in the name of `linux-source`: `6.1`."""
        return ".".join(self.release.split("-")[0].split(".")[:2])

    def fetch_image(self, folder: Path) -> Path:
        """Return a folder with `boot` and `lib/modules`."""

        def make(target: Path) -> None:
            _unpack(target, self._pinned(f"linux-image-{self.release}"))
            _run(["depmod", "-b", str(target), self.release])

        return once(folder / "image", make)

    def fetch_headers(self, folder: Path) -> Path:
        """Return the folder to build modules against."""
        final = folder / "headers"

        def make(target: Path) -> None:
            name = f"linux-headers-{self.release}"
            _unpack(target, self._pinned(name, *_depends(name)))
            makefile = target / "usr/src" / name / "Makefile"
            # It includes the common Makefile by the path of an installation.
            makefile.write_text(makefile.read_text().replace("/usr/src/", f"{final}/usr/src/"))

        return once(final, make) / "usr/src" / f"linux-headers-{self.release}"

    def fetch_samples(self, folder: Path) -> Path:
        """Return the kernel's samples of mediated device drivers."""

        def make(target: Path) -> None:
            name = f"linux-source-{self.series}"
            archive = _download(target, self._pinned(name))[0]
            _run(["sh", "-c", TAKE_SAMPLES, "sh", str(archive), name, str(target), SAMPLES])
            archive.unlink()

        return once(folder / "samples", make)

    def _pinned(self, *names: str) -> list[str]:
        return [f"{name}={self.version}" for name in names]


@dataclass(frozen=True, slots=True)
class SourcePackage:
    """The kernel's complete source, of one series."""

    series: str
    version: str

    def unpack(self, folder: Path) -> None:
        """Fetch the source, and unpack it into a folder (1.6 GB)."""
        name = f"linux-source-{self.series}"
        archive = _download(folder.parent, [f"{name}={self.version}"])[0]
        _run(["sh", "-c", TAKE_SOURCE, "sh", str(archive), name, str(folder)])
        archive.unlink()


def find_kernel() -> KernelPackages:
    """Return the kernel that apt would install on this system."""
    return _with_lists(_newest)


def find_source(series: str) -> SourcePackage:
    """Return the newest source of a series."""
    return _with_lists(lambda: SourcePackage(series, _version(f"linux-source-{series}")))


def _with_lists(find: Callable[[], T]) -> T:
    """Look something up in apt's lists, and fetch the lists where they are missing."""
    try:
        return find()
    except LabError:
        _run(["apt-get", "update", "-qq"])
        return find()


def _newest() -> KernelPackages:
    image = next((name for name in _depends(META) if name.startswith("linux-image-")), None)
    if image is None:
        raise LabError(f"apt lists no {META}")
    return KernelPackages(image.removeprefix("linux-image-"), _version(image))


def _version(package: str) -> str:
    try:
        shown = _run(["apt-cache", "show", "--no-all-versions", package])
    except LabError as error:
        raise LabError(f"apt lists no {package}; Debian 12 has it in bookworm or bookworm-security: {error}") from error
    return next(line.split()[1] for line in shown.splitlines() if line.startswith("Version:"))


def _depends(package: str) -> list[str]:
    lines = _run(["apt-cache", "depends", "--important", package]).splitlines()
    names = [line.split()[1] for line in lines if line.strip().startswith("Depends:")]
    return [name for name in names if name.startswith("linux-")]


def _unpack(target: Path, packages: Sequence[str]) -> None:
    for archive in _download(target, packages):
        _run(["dpkg", "-x", str(archive), str(target)])
        archive.unlink()


def _download(target: Path, packages: Sequence[str]) -> list[Path]:
    command = ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *packages]
    try:
        _run(command, target)
    except LabError:  # apt's lists are older than the archive
        _run(["apt-get", "update", "-qq"])
        _run(command, target)
    return sorted(target.glob("*.deb"))


def _run(command: Sequence[str], folder: Path | None = None) -> str:
    plain = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout
