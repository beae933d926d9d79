"""gpuvirt's images, built from the Dockerfile by buildah, without a daemon or a registry."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.cache import cache_root, locked
from lab.cluster.baseimage import REFERENCE, ImageError, base_image, run
from lab.cluster.images import PREFIX

DEFAULT = "gpuvirt"
"""The lab's name for the image of `docker build .`, which names no target."""
NAME = f"{DEFAULT}:lab"
VGPU_DM = "nvidia-k8s-vgpu-dm:lab"
STAGE = re.compile(r"^FROM\s.*\sAS\s+(\S+)", re.IGNORECASE | re.MULTILINE)
PIP_CONF = "pip.conf"
COMPLETE = "complete"
"""The file of the builder's folder that exists unless a build was killed."""
MOST_KEPT_GIB = 6
"""Of layers; they are made again where there are more."""
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
PIP_SETTINGS = {"index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout", "retries"}
"""The settings of this computer's pip that a build uses: how to reach the index."""


@dataclass(frozen=True, slots=True)
class Builder:
    """buildah, with a storage of its own, which contains the base image and what earlier builds have made of it."""

    folder: Path
    options: tuple[str, ...]
    """The options of each build."""

    def build(self, tree: Path, target: str | None, name: str) -> None:
        """Build one target of the Dockerfile in `tree`, None for the default one; raise ImageError."""
        stage = () if target is None else (f"--target={target}",)
        what = (f"--tag={PREFIX}/{name}", f"--file={tree}/Dockerfile", str(tree))
        try:
            self._run("build", *self.options, *stage, *what)
        except ImageError as error:
            which = "the default target" if target is None else f"target {target}"
            hint = f"(The lab's only base image is {REFERENCE}.)"
            raise ImageError(f"{tree}/Dockerfile: {which}: {error}\n{hint}") from error

    def export(self, name: str, archive: Path) -> None:
        """Write an image as a docker archive."""
        archive.unlink(missing_ok=True)
        self._run("push", f"{PREFIX}/{name}", f"docker-archive:{archive}:{PREFIX}/{name}")

    def load(self, archive: Path) -> None:
        """Import an image from a docker archive."""
        self._run("pull", f"docker-archive:{archive}")

    def _run(self, verb: str, *arguments: str) -> None:
        storage = [f"--root={self.folder}/storage", f"--runroot={self.folder}/run", "--storage-driver=overlay"]
        run(["buildah", *storage, verb, *arguments])


def targets(tree: Path) -> tuple[str, ...]:
    """Return the named stages of the Dockerfile in `tree`."""
    return tuple(STAGE.findall((tree / "Dockerfile").read_text()))


def build_images(tree: Path, folder: Path) -> Mapping[str, Path]:
    """Build every target of the Dockerfile in `tree`; return docker archives in `folder` of the images that pods run.

    Raises ImageError.
    """
    base = base_image()
    with image_builder() as builder:
        builder.load(base)
        builder.build(tree, None, NAME)
        for target in targets(tree):
            builder.build(tree, target, f"{target}:lab")
        archives = {name: folder / f"{name.partition(':')[0]}.tar" for name in (NAME, VGPU_DM)}
        for name, archive in archives.items():
            builder.export(name, archive)
    return archives


@contextmanager
def image_builder() -> Iterator[Builder]:
    """Provide the only builder on this computer; first remove the mounts of a build that was killed."""
    alone = cache_root() / "image-build-alone"
    alone.mkdir(exist_ok=True)
    folder = cache_root() / "image-build"
    with locked(alone):
        _unmount(folder)
        if not is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / COMPLETE).unlink(missing_ok=True)
        try:
            yield Builder(folder, ("--isolation=chroot", "--pull-never", "--layers", *_pip_mounts(folder)))
        finally:
            _unmount(folder)
            (folder / PIP_CONF).unlink()
            (folder / COMPLETE).touch()


def is_whole(folder: Path, most_gib: float = MOST_KEPT_GIB) -> bool:
    """Return whether layers of earlier builds may be used: no build was killed, and they do not fill the disk."""
    if not (folder / COMPLETE).exists():
        return False
    kept = sum(path.lstat().st_size for path in (folder / "storage").rglob("*"))
    return kept < most_gib * (1 << 30)


def _unmount(folder: Path) -> None:
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "-l", mount], check=True)


def _pip_mounts(folder: Path) -> Iterator[str]:
    """Yield the mounts by which pip reaches its index during a build; the image contains none of them."""
    settings = _pip_settings()
    lines = [f"{key} = {value}" for key, value in settings.items() if key in PIP_SETTINGS]
    if "cert" in settings:
        lines.append(f"cert = {CERTIFICATES}")
        yield f"--volume={Path(settings['cert']).resolve()}:{CERTIFICATES}:ro"
    file = folder / PIP_CONF
    file.write_text("\n".join(("[global]", *lines, "")))
    yield f"--volume={file}:/etc/pip.conf:ro"


def _pip_settings() -> Mapping[str, str]:
    """Return the settings of this computer's pip; those of the environment have precedence."""
    listed = run([sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"])
    settings = sorted(line.partition("=") for line in listed.splitlines() if "=" in line)
    settings.sort(key=lambda setting: setting[0].startswith(":env:"))
    return {key.rpartition(".")[2]: str(ast.literal_eval(value)) for key, _, value in settings}
