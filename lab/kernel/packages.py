"""Debian's kernel, headers and samples, fetched with apt and unpacked into the cache without an installation.

The packages of one kernel have several versions: images are signed later than the others are built. So apt's own
resolver chooses each, as for a system without packages. For hours the archive may lack an image's headers, or a file
that its lists name. Then an older kernel is taken: the one of Debian's last point release.
"""

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from lab.cache import once, say
from lab.kernel.errors import LabError, NotAvailableError

Packages = TypeVar("Packages")
Made = TypeVar("Made")

META = "linux-image-amd64"
SAMPLES = "samples/vfio-mdev"
NO_PACKAGES = "Dir::State::status=/dev/null"
"""The option by which apt's resolver takes no package for installed."""
CHOSEN = re.compile(r"^Inst (\S+) \((\S+) ", re.MULTILINE)
"""A line of a simulated installation: the package and its version."""
VERSION = re.compile(r"^Version: (\S+)$", re.MULTILINE)
IMAGE = re.compile(r"^Depends:.*?\blinux-image-([^\s,]+)", re.MULTILINE)
HEADERS = re.compile(r"linux-(headers|kbuild|compiler)-.*")
"""The packages to build modules against."""

TAKE_SOURCE = 'dpkg --fsys-tarfile "$1" | tar -xO "./usr/src/$2.tar.xz" | tar -xJ -C "$3" --strip-components=1'
TAKE_SAMPLES = 'dpkg --fsys-tarfile "$1" | tar -xO "./usr/src/$2.tar.xz" | tar -xJ -C "$3" --strip-components=3 "$2/$4"'


@dataclass(frozen=True, slots=True)
class KernelPackages:
    """The packages that apt would install together with one image."""

    release: str
    """The output of `uname -r`: `6.1.0-56-amd64`."""
    version: str
    """The version of the image: `6.1.192-2`."""

    @override
    def __str__(self) -> str:
        return f"linux-image-{self.release} {self.version}"

    @property
    def series(self) -> str:
        """The series, as in the name of `linux-source`: `6.1`."""
        return ".".join(self.release.split("-")[0].split(".")[:2])

    def fetch_image(self, folder: Path) -> Path:
        """Return a folder with `boot` and `lib/modules`."""

        def make(target: Path) -> None:
            name = f"linux-image-{self.release}"
            _unpack(target, self._chosen(re.compile(re.escape(name))))
            run(["depmod", "-b", str(target), self.release])

        return once(folder / "image", make)

    def fetch_headers(self, target: Path) -> Path:
        """Fetch the headers into an empty folder, and return the folder to build modules against."""
        _unpack(target, self._chosen(HEADERS))
        headers = target / "usr/src" / f"linux-headers-{self.release}"
        makefile = headers / "Makefile"
        # It includes the common Makefile by the path of an installation.
        makefile.write_text(makefile.read_text().replace("/usr/src/", f"{target}/usr/src/"))
        return headers

    def fetch_samples(self, folder: Path) -> Path:
        """Return the kernel's samples of mediated device drivers."""

        def make(target: Path) -> None:
            name = f"linux-source-{self.series}"
            archive = _download(target, self._chosen(re.compile(re.escape(name))))[0]
            run(["sh", "-c", TAKE_SAMPLES, "sh", str(archive), name, str(target), SAMPLES])
            archive.unlink()

        return once(folder / "samples", make)

    def _chosen(self, which: re.Pattern[str]) -> list[str]:
        """Return the packages with such names, each with the version that apt would install beside this image."""
        image, headers = f"linux-image-{self.release}={self.version}", f"linux-headers-{self.release}"
        together = (image, headers, f"linux-source-{self.series}")
        simulated = _apt(["apt-get", "install", "--simulate", "--no-install-recommends", "-o", NO_PACKAGES, *together])
        return [f"{name}={version}" for name, version in CHOSEN.findall(simulated) if which.fullmatch(name)]


@dataclass(frozen=True, slots=True)
class SourcePackage:
    """The kernel's complete source, of one series."""

    series: str
    version: str

    @override
    def __str__(self) -> str:
        return f"linux-source-{self.series} {self.version}"

    def unpack(self, folder: Path) -> None:
        """Fetch the source, and unpack it into a folder (1.6 GB)."""
        name = f"linux-source-{self.series}"
        archive = _download(folder.parent, [f"{name}={self.version}"])[0]
        run(["sh", "-c", TAKE_SOURCE, "sh", str(archive), name, str(folder)])
        archive.unlink()


def take_newest(find: Callable[[], Sequence[Packages]], make: Callable[[Packages], Made]) -> Made:
    """Make something of the newest packages that the archive has and that fit together; report which ones don't.

    Where the newest ones can't be taken, apt's lists may be older than the archive, so they are fetched first.
    Raises LabError, at once where `make` fails for another reason.
    """
    try:
        return make(find()[0])
    except NotAvailableError as error:
        earlier = f"before apt-get update: {error}"
    failures: list[str] = []
    try:
        # Without this option, it succeeds where a list can't be fetched.
        _apt(["apt-get", "update", "-qq", "-o", "APT::Update::Error-Mode=any"])
    except NotAvailableError as error:
        failures.append(str(error))
    for packages in _found(find, failures):
        try:
            made = make(packages)
        except NotAvailableError as error:
            failures.append(f"{packages}: {error}")
        else:
            if failures:
                say("\n".join((f"{packages} is taken, after these failures:", *failures)))
            return made
    raise NotAvailableError("\n".join((earlier, *failures)))


def _found(find: Callable[[], Sequence[Packages]], failures: list[str]) -> Sequence[Packages]:
    try:
        return find()
    except NotAvailableError as error:
        failures.append(str(error))
        return ()


def find_kernels() -> list[KernelPackages]:
    """Return the kernels that apt lists, the one that it would install first; raise NotAvailableError without one."""
    images = ((IMAGE.search(entry), version) for version, entry in _listed(META))
    return [KernelPackages(image[1], version) for image, version in images if image is not None]


def find_sources(series: str) -> list[SourcePackage]:
    """Return the sources of a series that apt lists, the newest first; raise NotAvailableError without one."""
    return [SourcePackage(series, version) for version, _ in _listed(f"linux-source-{series}")]


def _listed(package: str) -> list[tuple[str, str]]:
    """Return the versions of a package, each with its entry: the one that apt would install, and then older ones.

    Newer ones are of a release that this system does not install from, such as backports.
    """
    try:
        shown = [run(["apt-cache", "show", option, package]) for option in ("--no-all-versions", "--all-versions")]
    except LabError as error:
        message = f"apt lists no {package}; Debian 12 has it in bookworm or bookworm-security: {error}"
        raise NotAvailableError(message) from error
    candidate, entries = shown[0].strip(), shown[1].strip().split("\n\n")
    older = entries[entries.index(candidate) :] if candidate in entries else ()
    listed = [(version[1], entry) for entry in older if (version := VERSION.search(entry)) is not None]
    if not listed:
        raise NotAvailableError(f"apt lists no {package} that it would install")
    return listed


def _unpack(target: Path, packages: Sequence[str]) -> None:
    for archive in _download(target, packages):
        run(["dpkg", "-x", str(archive), str(target)])
        archive.unlink()


def _download(target: Path, packages: Sequence[str]) -> list[Path]:
    if not packages:  # without a name, apt-get succeeds
        raise NotAvailableError("apt would install no such package")
    _apt(["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *packages], target)
    return sorted(target.glob("*.deb"))


def _apt(command: Sequence[str], folder: Path | None = None) -> str:
    try:
        return run(command, folder)
    except LabError as error:
        raise NotAvailableError(str(error)) from error


def run(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a program, also of /usr/sbin, which is not in every PATH; return its output, or raise LabError."""
    settings = {**os.environ, "LC_ALL": "C", "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
    try:
        done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise LabError(f"{command[0]} is missing") from error
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-4000:]}")
    return done.stdout
