"""The base image that the Dockerfile names, made of Debian's packages: the lab reaches no container registry."""

import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from lab.cache import cache_root, digest, once
from lab.cluster.images import write_archive

REFERENCE = "docker.io/library/python:3.13-slim-trixie"
SUITE = "trixie"
PYTHON = "Python 3.13."
"""The prefix that the output of `python --version` must have, so that the image has the version of its name."""
PACKAGES = ("python3", "python3-dev", "python3-pip", "ca-certificates")
SEARCH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
EMPTIED = ("dev", "var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/man", "usr/share/locale")
OF_THIS_HOST = ("etc/resolv.conf", "etc/hostname")
"""Files that debootstrap copies from the host."""


class ImageError(Exception):
    """An image can't be made; the text says why."""


def base_image() -> Path:
    """Return a docker archive of the base image, which is made once; raises ImageError."""
    recipe = digest(Path(__file__).read_text())
    return once(cache_root() / f"python-base-{recipe}", _make) / "image.tar"


def run(command: list[str]) -> str:
    """Run a command and return its standard output; raises ImageError."""
    if shutil.which(command[0]) is None:
        raise ImageError(f"{command[0]} is missing; install it (Debian: apt-get install {command[0]})")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ImageError(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stderr or done.stdout)[-3000:]}")
    return done.stdout


def _make(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="debian-") as work:
        root, layer = Path(work) / "root", Path(work) / "layer.tar"
        run(["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root)])
        version = run(["chroot", str(root), "python3", "--version"])
        if not version.startswith(PYTHON):
            raise ImageError(f"Debian's {SUITE} has {version.strip()}, and {REFERENCE} needs {PYTHON}*")
        _shape(root)
        with tarfile.open(layer, "w") as archive:
            archive.add(root, ".")
        write_archive(folder / "image.tar", REFERENCE, layer, (), SEARCH)


def _shape(root: Path) -> None:
    """Make Debian's Python look like the base image's: `python` on PATH, and a pip that installs for all users."""
    for name in EMPTIED:
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir()
    for name in OF_THIS_HOST:
        (root / name).unlink(missing_ok=True)
    for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
