"""`make image`, `make bundle` and `make release`: what they write, and that a bundle is enough without a network."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import make_release
import pytest
from lab.cluster.baseimage import base_image
from lab.cluster.ourimage import image_builder
from sbom import sbom

from gpuvirt import __version__

ROOT = Path(__file__).parent.parent.parent
BUILDER = '#!/bin/sh\necho "${0##*/} $*" >>%s\n[ "$1" != info ] || exit %d\n'
NOT_IN_A_CLONE = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "shared", "dist")
OFFLINE = ("unshare", "--net")


@dataclass(frozen=True)
class Builders:
    """A folder of programs that record their calls."""

    folder: Path

    def add(self, name: str, *, daemon: bool = True) -> None:
        program = self.folder / name
        program.write_text(BUILDER % (self.folder / "calls", 0 if daemon else 1))
        program.chmod(0o755)

    def make_image(self, *options: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        environment = {"PATH": f"{self.folder}:{self.folder}/base", **variables}
        return subprocess.run(
            ["/bin/sh", str(self.folder / "tree/tools/make-image"), *options],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> Sequence[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def builders(tmp_path: Path) -> Builders:
    """A tree with the script and the version alone, and a PATH without the builders of this computer."""
    for name in ("tools/make-image", "src/gpuvirt/__init__.py"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True)
        (tmp_path / "tree" / name).write_text((ROOT / name).read_text())
    (tmp_path / "base").mkdir()
    for name in ("sed", "cat", "mkdir", "rm", "dirname"):
        (tmp_path / "base" / name).symlink_to(str(shutil.which(name)))
    return Builders(tmp_path)


def test_an_image_is_pushed_to_the_registry(builders: Builders) -> None:
    builders.add("podman")
    done = builders.make_image("--pull-never", REGISTRY="registry.example.com/team")
    name = f"registry.example.com/team/gpuvirt:{__version__}"
    assert builders.calls() == [f"podman build --pull-never --tag {name} --file Dockerfile .", f"podman push {name}"]
    assert "--set image.repository=registry.example.com/team/gpuvirt\n" in done.stdout


@pytest.mark.parametrize(
    ("builder", "written"),
    [
        ("buildah", "buildah push localhost/gpuvirt:{0} docker-archive:{1}:localhost/gpuvirt:{0}"),
        ("podman", "podman save --output {1} localhost/gpuvirt:{0}"),
        ("docker", "docker save --output {1} localhost/gpuvirt:{0}"),
    ],
)
def test_without_a_registry_an_image_is_an_archive(builders: Builders, builder: str, written: str) -> None:
    builders.add(builder)
    done = builders.make_image()
    archive = f"dist/gpuvirt-{__version__}-image.tar"
    assert builders.calls()[-1] == written.format(__version__, archive)
    assert f"k3s ctr images import {archive}\n" in done.stdout


def test_a_docker_without_its_daemon_builds_nothing(builders: Builders) -> None:
    builders.add("docker", daemon=False)
    done = builders.make_image()
    assert done.returncode == 1
    assert "expected buildah, podman or a running docker" in done.stderr
    builders.add("podman")
    assert builders.make_image().returncode == 0
    builders.add("buildah")
    assert builders.make_image(BUILDER="podman").returncode == 0
    assert {line.split()[0] for line in builders.calls()} == {"docker", "podman"}


def test_the_chart_package_has_the_chart(tmp_path: Path) -> None:
    make_release.make_package(tmp_path)
    with tarfile.open(tmp_path / make_release.PACKAGE) as package:
        found = {entry.name: package.extractfile(entry) for entry in package}
        packed = {name: file.read() for name, file in found.items() if file is not None}
    chart = ROOT / "deploy/chart"
    assert packed == {f"gpuvirt/{path.relative_to(chart)}": path.read_bytes() for path in files_of(chart)}
    first = (tmp_path / make_release.PACKAGE).read_bytes()
    make_release.make_package(tmp_path)
    assert (tmp_path / make_release.PACKAGE).read_bytes() == first


def files_of(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def test_sums_are_checked_by_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/a.whl").write_text("a")
    make_release.write_sums(tmp_path)
    check = ["/usr/bin/env", "sha256sum", "--check", "--strict", make_release.SUMS]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    (tmp_path / "wheels/a.whl").write_text("b")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1


LIBRARY = "usr/local/lib/python3.13/site-packages"
DPKG = "Package: {}\nStatus: install ok {}\nArchitecture: amd64\nVersion: 1:2.0+b1\n"
FIRST = {
    "./var/lib/dpkg/status": DPKG.format("old", "installed"),
    f"./{LIBRARY}/other-3.dist-info/METADATA": "Name: Other.Name\nVersion: 3\n",
}
SECOND = {
    "var/lib/dpkg/status": DPKG.format("libvirt0", "installed") + "\n" + DPKG.format("gone", "config-files"),
    f"{LIBRARY}/gpuvirt-1.dist-info/METADATA": (
        "Name: gpuvirt\nVersion: 1\nLicense-Expression: Apache-2.0\nRequires-Dist: other_name>=2\n"
        "Requires-Dist: absent; extra == 'dev'\n"
    ),
    f"{LIBRARY}/gpuvirt-1.dist-info/RECORD": "",
}


def test_an_sbom_has_the_packages_of_an_image(tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    with tarfile.open(archive, "w") as tar:
        for name, layer in (("a/layer.tar", FIRST), ("b/layer.tar", SECOND)):
            add(tar, name, layer_of(layer))
        add(tar, "manifest.json", json.dumps([{"Config": "c", "Layers": ["a/layer.tar", "b/layer.tar"]}]).encode())
    made = json.loads(sbom(archive))
    assert (made["bomFormat"], made["specVersion"], made["version"]) == ("CycloneDX", "1.6", 1)
    assert {component["purl"]: component.get("licenses") for component in made["components"]} == {
        "pkg:pypi/gpuvirt@1": [{"expression": "Apache-2.0"}],
        "pkg:pypi/other-name@3": None,
        "pkg:deb/debian/libvirt0@1%3A2.0%2Bb1?arch=amd64": None,
    }
    edges = {dependency["ref"]: dependency["dependsOn"] for dependency in made["dependencies"]}
    assert edges["gpuvirt"] == ["other-name"]
    assert set(edges["image"]) == {component["bom-ref"] for component in made["components"]}
    assert sbom(archive) == sbom(archive)


def layer_of(files: dict[str, str]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as layer:
        for name, text in files.items():
            add(layer, name, text.encode())
    return data.getvalue()


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


@pytest.mark.ring("image")
@pytest.mark.xdist_group("cluster")
@pytest.mark.timeout(900)
def test_a_bundle_is_enough_without_a_network(tmp_path: Path) -> None:
    """Its wheels are installed, and its image is loaded, in a network namespace that has no route."""
    tree = shutil.copytree(ROOT, tmp_path / "tree", ignore=NOT_IN_A_CLONE)
    with image_builder() as builder:
        builder.load(base_image())
        storage = f"--root={builder.folder}/storage --runroot={builder.folder}/run --storage-driver=overlay"
        wrapper = tmp_path / "bin/buildah"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nPATH=${{PATH#*:}}\nexec buildah {storage} "$@"\n')
        wrapper.chmod(0o755)
        environment = os.environ | {"PATH": f"{wrapper.parent}:{os.environ['PATH']}"}  # noqa: TID251  handed on
        for what in ("release", "bundle"):
            make = [sys.executable, str(tree / "tools/make_release.py"), what, *builder.options]
            done = subprocess.run(make, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        made = {path.name for path in (tree / "dist").iterdir()}
        assert made == {
            *(f"gpuvirt{part}-{__version__}-py3-none-any.whl" for part in ("", "_schedules", "_sim")),
            *(f"gpuvirt{part}-{__version__}.tar.gz" for part in ("", "_schedules", "_sim")),
            *(f"gpuvirt-{__version__}{end}" for end in (".tgz", "-image.tar", "-bundle.tar", ".cdx.json")),
            "SHA256SUMS",
        }
        with tarfile.open(tree / f"dist/{make_release.BUNDLE}.tar") as archive:
            archive.extractall(tmp_path, filter="data")
        bundle, python = tmp_path / make_release.BUNDLE, tmp_path / "venv/bin"
        offline(bundle, "sha256sum", "--check", "--quiet", "SHA256SUMS")
        offline(bundle, sys.executable, "-m", "venv", str(python.parent))
        wheels = ("--no-index", "--find-links", "wheels")
        offline(bundle, f"{python}/pip", "install", *wheels, "gpuvirt", "gpuvirt-schedules", "gpuvirt-sim")
        assert offline(bundle, f"{python}/gpuvirt", "version") == f"gpuvirt {__version__}\n"
        assert "GPUs" in offline(bundle, f"{python}/gpuvirt", "demo")
        offline(bundle, str(wrapper), "pull", f"docker-archive:{make_release.IMAGE}")


def offline(folder: Path, *command: str) -> str:
    """Run a command where no network can be reached, and return its output."""
    done = subprocess.run([*OFFLINE, *command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
