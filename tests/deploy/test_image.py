"""`docker build` without Docker: each target of the Dockerfile is built, and its faults are reported."""

import json
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from lab.cluster.baseimage import REFERENCE, ImageError, base_image
from lab.cluster.ourimage import NAME, VGPU_DM, build_images, targets

from tests.deploy.pythonpackages import Packages, expected_distributions, packages_of

pytestmark = [pytest.mark.ring("image"), pytest.mark.xdist_group("cluster")]

ROOT = Path(__file__).parent.parent.parent
NOT_IN_A_CLONE = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "shared")
COMMANDS = ("gpuvirt", "nvidia-kubevirt-gpu-device-plugin", "vfio-manage", "nvidia-vgpu-dm", "nvidia-k8s-vgpu-dm")


@dataclass(frozen=True, slots=True)
class Image:
    """A docker archive."""

    archive: Path

    def config(self) -> Mapping[str, object]:
        """Return the configuration of its containers."""
        with tarfile.open(self.archive) as tar:
            (manifest,) = json.load(_member(tar, "manifest.json"))
            found: Mapping[str, object] = json.load(_member(tar, manifest["Config"]))["config"]
            return found

    def files(self) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
        """Yield all files of all layers, with the content of regular files."""
        with tarfile.open(self.archive) as tar:
            (manifest,) = json.load(_member(tar, "manifest.json"))
            for name in manifest["Layers"]:
                with tarfile.open(fileobj=_member(tar, name)) as layer:
                    for entry in layer:
                        content = layer.extractfile(entry) if entry.isreg() else None
                        yield entry, b"" if content is None else content.read()


def _member(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    """Return a file of an archive in which some names are links to others."""
    found = tar.extractfile(name)
    assert found is not None
    return found


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of this tree that tests may break."""
    return shutil.copytree(ROOT, tmp_path / "clone", ignore=NOT_IN_A_CLONE)


def test_every_target_is_built_and_starts_its_program(images: Mapping[str, Path]) -> None:
    assert targets(ROOT) == ("build", "installed", "nvidia-k8s-vgpu-dm", "gpuvirt")
    started = {name: Image(archive).config() for name, archive in images.items()}
    assert started.keys() == {NAME, VGPU_DM}
    assert {name: config["Entrypoint"] for name, config in started.items()} == {
        NAME: ["gpuvirt"],
        VGPU_DM: ["nvidia-k8s-vgpu-dm"],
    }
    assert started[NAME]["Cmd"] == ["node"]
    assert {config["User"] for config in started.values()} == {"0:0"}


def test_the_image_has_all_commands_and_no_file_of_the_build_host(images: Mapping[str, Path]) -> None:
    files = {entry.name.removeprefix("./"): (entry, content) for entry, content in Image(images[NAME]).files()}
    for command in COMMANDS:
        entry, content = files[f"usr/local/bin/{command}"]
        assert entry.mode & 0o111 == 0o111
        assert content.startswith(b"#!/usr/bin/python3")
    for name in ("etc/hostname", "etc/pip.conf", "etc/resolv.conf"):  # builders mount their own files here
        assert files.get(name, (None, b""))[1] == b""
    assert [name for name in files if name.endswith("/pyVmomi/SoapAdapter.py")], "the controller asks vSphere"
    assert [name for name in files if "/libvirtmod." in name], "the controller asks libvirt"
    assert [name for name in files if "/libvirt.so.0" in name], "by its library"
    assert [name for name in files if name.startswith(("src/", "root/.cache/"))] == []
    assert [name for name in files if name.endswith("/gpuvirt/agent/agent.py")]
    assert [name for name in files if "gpuvirt_sim" in name] == []


def test_the_images_have_no_python_package_but_gpuvirt_and_what_it_requires(images: Mapping[str, Path]) -> None:
    """They run as root on real hosts. The base image has Python's library and pip."""
    base = {entry.name.removeprefix("./") for entry, _ in Image(base_image()).files()}
    expected = Packages(expected_distributions(ROOT), strays=frozenset())
    for name, archive in images.items():
        files = {
            entry.name.removeprefix("./"): content for entry, content in Image(archive).files() if not entry.isdir()
        }
        added = {path: content for path, content in files.items() if path not in base}
        assert (name, packages_of(added)) == (name, expected)


def test_a_copy_of_a_missing_file_fails_the_build(clone: Path, tmp_path: Path) -> None:
    (clone / "constraints.txt").unlink()
    with pytest.raises(ImageError, match=r"(?s)clone/Dockerfile: the default target: .*constraints\.txt.*no such file"):
        build_images(clone, tmp_path)


def test_a_failing_command_fails_the_build(clone: Path, tmp_path: Path) -> None:
    (clone / "pyproject.toml").write_text("[build-system]\nrequires = []\nbuild-backend = 'none'\n")
    with pytest.raises(ImageError, match=r"(?s)pip wheel .*exit status"):
        build_images(clone, tmp_path)


def test_an_unavailable_base_image_fails_the_build(clone: Path, tmp_path: Path) -> None:
    dockerfile = clone / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text().replace("python:3.13-slim-trixie", "python:3.99-slim-trixie"))
    with pytest.raises(ImageError, match=rf"(?s)python:3\.99-slim-trixie.*only base image is {REFERENCE}"):
        build_images(clone, tmp_path)


def test_a_target_without_dependents_is_built(clone: Path, tmp_path: Path) -> None:
    stages = (f"FROM {REFERENCE} AS installed", "FROM installed AS nvidia-k8s-vgpu-dm", "COPY nowhere /")
    (clone / "Dockerfile").write_text("\n".join((*stages, "FROM installed AS gpuvirt", "USER 0:0")))
    with pytest.raises(ImageError, match=r"(?s)target nvidia-k8s-vgpu-dm: .*nowhere.*no such file"):
        build_images(clone, tmp_path)
