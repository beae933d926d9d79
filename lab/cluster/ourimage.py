"""An image of gpuvirt without a registry: Debian's smallest system with Python, and the wheel with what it needs."""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from lab.cache import cache_root, once
from lab.cluster import images

SUITE = "bookworm"
PYTHON = "3.11"
"""Debian 12's."""
PLACE = "opt/gpuvirt"
"""Where, in the image, the wheel and what it needs lie."""
NAME = "gpuvirt:lab"


class ImageError(Exception):
    """The image can't be made; the text says why."""


def make_image(tree: Path, archive: Path) -> None:
    """Write a docker archive of the gpuvirt in `tree`; raises ImageError."""
    base = _base()
    with tempfile.TemporaryDirectory(prefix="gpuvirt-image-") as work:
        wheels, place, layer = Path(work) / "wheels", Path(work) / "place", Path(work) / "layer.tar"
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(tree)])
        (wheel,) = wheels.glob("gpuvirt-*.whl")
        pins = ["--constraint", str(tree / "constraints.txt"), "--only-binary=:all:", "--python-version", PYTHON]
        _run([*pip, "install", "--target", str(place), *pins, str(wheel)])
        shutil.copy(base, layer)
        with tarfile.open(layer, "a") as tar:
            tar.add(place, PLACE)
        command = ["/usr/bin/env", f"PYTHONPATH=/{PLACE}", "/usr/bin/python3", "-m", "gpuvirt"]
        images.write_archive(archive, NAME, layer, command, "/usr/local/bin:/usr/bin:/bin")


def _base() -> Path:
    """Return a tar of Debian's smallest system with Python, made once."""
    if shutil.which("debootstrap") is None:
        raise ImageError("no debootstrap; install it (Debian: apt-get install debootstrap)")
    return once(cache_root() / f"debian-{SUITE}-python3", _bootstrap) / "base.tar"


def _bootstrap(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="debian-") as work:
        root = Path(work) / "root"
        _run(["debootstrap", "--variant=minbase", "--include=python3-minimal,libpython3-stdlib", SUITE, str(root)])
        for waste in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
            shutil.rmtree(root / waste, ignore_errors=True)
        with tarfile.open(folder / "base.tar", "w") as out:
            out.add(root, ".")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ImageError(f"{' '.join(command[:4])} failed:\n{(done.stderr or done.stdout)[-2000:]}")
