"""`deploy/vgpu-manager/build`, with a builder that only records its arguments and input files."""

import json
import os
import signal
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

BUILD = Path(__file__).parent.parent.parent / "deploy/vgpu-manager/build"
SCRIPT = b"#! /bin/sh\n"
DRIVER = "NVIDIA-Linux-x86_64-510.73.06-vgpu-kvm.run"
AIE = "NVIDIA-Linux-x86_64-510.73.06-vgpu-kvm-aie.run"
IMAGE = "registry.example.com:5000/gpus/vgpu-manager:510.73.06"
BUILD_ARGS = ("--build-arg", "DRIVER_VERSION=510.73.06", "--build-arg", "CUDA_VERSION=11.7.1")
FOLDERS = ("rhel8", "rhel9", "ubuntu20.04", "ubuntu22.04")

BUILDER = """#!{python}
import json, os, sys
from pathlib import Path
files = {{str(one): one.read_bytes().decode() for one in sorted(Path().rglob("*")) if one.is_file()}}
with open({calls!r}, "a") as out:
    print(json.dumps({{"arguments": sys.argv[1:], "folder": os.getcwd(), "files": files}}), file=out)
print("the builder's own words")
{more}
"""


class Call(msgspec.Struct):
    """A call of the builder: arguments and folder."""

    arguments: list[str]
    folder: str
    files: dict[str, str]


class Bench:
    """A folder with a builder, a checkout, and bundles of vGPU software."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = folder / "driver"
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        for name in FOLDERS:
            self.add_folder(name)
        self.make_builder()
        self.environment = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",  # noqa: TID251  handed on
            "TMPDIR": str(self.scratch),
            "PRIVATE_REGISTRY": "registry.example.com:5000/gpus",
            "VERSION": "510.73.06",
            "OS_TAG": "ubuntu22.04",
            "CUDA_VERSION": "11.7.1",
        }

    def add_folder(self, name: str, dockerfile: str = "ARG CUDA_VERSION\n") -> None:
        folder = self.tree / "vgpu-manager" / name
        folder.mkdir(parents=True)
        (folder / "Dockerfile").write_text(dockerfile)
        (folder / "nvidia-driver").write_text(f"of {name}")

    def make_builder(self, name: str = "docker", more: str = "") -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(BUILDER.format(python=sys.executable, calls=str(self.folder / "calls"), more=more))
        path.chmod(0o755)

    def run_file(self, name: str = DRIVER, content: bytes = SCRIPT) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path

    def zip(self, *names: str) -> Path:
        path = self.folder / "bundle.zip"
        with zipfile.ZipFile(path, "w") as bundle:
            for name in names:
                bundle.writestr(name, SCRIPT)
        return path

    def build(self, software: Path, *options: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, str(BUILD), *options, str(software), str(self.tree)],
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def calls(self) -> list[Call]:
        written = self.folder / "calls"
        lines = written.read_text().splitlines() if written.exists() else []
        return [msgspec.json.decode(line, type=Call) for line in lines]

    def snapshot(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(self.tree.rglob("*")) if path.is_file()}


@pytest.fixture(name="bench")
def make_bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize("name", [DRIVER, AIE])
@pytest.mark.parametrize("zipped", [False, True])
def test_the_image_is_built_and_pushed_from_a_copy(bench: Bench, name: str, *, zipped: bool) -> None:
    before = bench.snapshot()
    done = bench.build(bench.zip("readme.txt", f"Host_Drivers/{name}") if zipped else bench.run_file(name))
    assert done.returncode == 0, done.stderr
    build, push = bench.calls()
    assert build.arguments == ["build", *BUILD_ARGS, "-t", f"{IMAGE}-ubuntu22.04", "."]
    assert push.arguments == ["push", f"{IMAGE}-ubuntu22.04"]
    assert build.files == {
        "Dockerfile": "ARG CUDA_VERSION\n",
        "nvidia-driver": "of ubuntu22.04",
        DRIVER: SCRIPT.decode(),
    }
    assert ("is renamed" in done.stderr) == (name == AIE)
    assert bench.snapshot() == before
    assert Path(build.folder).is_relative_to(bench.scratch)
    assert list(bench.scratch.iterdir()) == []


def test_standard_output_is_helm_set_options(bench: Bench) -> None:
    assert bench.build(bench.run_file()).stdout.splitlines() == [
        "--set vgpuManager.enabled=true",
        "--set vgpuManager.repository=registry.example.com:5000/gpus",
        "--set vgpuManager.image=vgpu-manager",
        "--set vgpuManager.version=510.73.06",
    ]


def test_a_driver_file_in_the_checkout_is_ignored(bench: Bench) -> None:
    (bench.tree / "vgpu-manager/ubuntu22.04/NVIDIA-Linux-x86_64-470.63-vgpu-kvm.run").write_text("old")
    assert bench.build(bench.run_file()).returncode == 0
    assert sorted(bench.calls()[0].files) == ["Dockerfile", DRIVER, "nvidia-driver"]


@pytest.mark.parametrize(
    ("os_tag", "folder"),
    [
        ("ubuntu20.04", "ubuntu20.04"),
        ("rhcos4.9", "rhel8"),
        ("rhcos4.12", "rhel8"),
        ("rhcos4.13", "rhel9"),
        ("rhel9.6", "rhel9"),
        ("rhel8", "rhel8"),
    ],
)
def test_each_os_has_its_own_folder(bench: Bench, os_tag: str, folder: str) -> None:
    assert bench.build(bench.run_file(), OS_TAG=os_tag).returncode == 0
    (build, push) = bench.calls()
    assert build.files["nvidia-driver"] == f"of {folder}"
    assert push.arguments[-1].endswith(f"-{os_tag}")


def test_openshift_uses_the_rhel8_folder_without_a_rhel9_folder(bench: Bench) -> None:
    (bench.tree / "vgpu-manager/rhel9/Dockerfile").unlink()
    done = bench.build(bench.run_file(), OS_TAG="rhcos4.16")
    assert bench.calls()[0].files["nvidia-driver"] == "of rhel8"
    assert "note: the checkout has no folder rhel9, so rhel8 is used for rhcos4.16" in done.stderr


def test_the_folder_can_be_chosen_by_name(bench: Bench) -> None:
    assert bench.build(bench.run_file(), "--folder", "rhel9", OS_TAG="rocky9").returncode == 0
    build, push = bench.calls()
    assert build.files["nvidia-driver"] == "of rhel9"
    assert push.arguments == ["push", f"{IMAGE}-rocky9"]


def test_the_builder_can_be_a_command_with_options(bench: Bench) -> None:
    bench.make_builder("podman")
    assert bench.build(bench.run_file(), "--no-push", BUILDER="podman --log-level error").returncode == 0
    (build,) = bench.calls()
    assert build.arguments[:3] == ["--log-level", "error", "build"]


def test_the_builder_can_be_a_relative_path(bench: Bench) -> None:
    builder = os.path.relpath(bench.folder / "bin/docker")
    assert bench.build(bench.run_file(), BUILDER=builder).returncode == 0
    assert len(bench.calls()) == 2


@pytest.mark.parametrize("options", [(), ("--no-push",)])
def test_a_dry_run_prints_the_commands_and_runs_none(bench: Bench, options: tuple[str, ...]) -> None:
    done = bench.build(bench.zip(f"Host_Drivers/{DRIVER}"), "--dry-run", *options)
    comment, *lines = done.stdout.splitlines()
    assert comment.startswith(f"# in a copy of {bench.tree}/vgpu-manager/ubuntu22.04, with ")
    push = [] if options else [f"docker push {IMAGE}-ubuntu22.04"]
    command = f"docker build {' '.join(BUILD_ARGS)} -t {IMAGE}-ubuntu22.04 ."
    assert [line for line in lines if not line.startswith("--set")] == [command, *push]
    assert (bench.calls(), list(bench.scratch.iterdir())) == ([], [])


def test_a_failing_builder_ends_the_build(bench: Bench) -> None:
    bench.make_builder(more="sys.exit(3)")
    done = bench.build(bench.run_file())
    assert (done.returncode, done.stdout) == (1, "")
    assert "ended with 3" in done.stderr
    assert "the builder's own words" in done.stderr
    assert len(bench.calls()) == 1, "nothing is pushed"
    assert list(bench.scratch.iterdir()) == []


def test_sigterm_ends_the_build_without_leftovers(bench: Bench) -> None:
    bench.make_builder(more="import signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()")
    assert bench.build(bench.run_file()).returncode == 128 + signal.SIGTERM
    assert list(bench.scratch.iterdir()) == []


def test_all_mistakes_are_reported_at_once_and_nothing_is_built(bench: Bench) -> None:
    wrong = {"PRIVATE_REGISTRY": "", "VERSION": "510", "OS_TAG": "ubuntu24.04", "CUDA_VERSION": "11.7"}
    done = bench.build(bench.folder / "none.zip", BUILDER="no-such-builder", **wrong)
    assert (done.returncode, done.stdout, bench.calls()) == (2, "", [])
    reported = [line.strip().partition(": ")[0] for line in done.stderr.splitlines() if ": expected " in line]
    folders = str(bench.tree / "vgpu-manager")
    assert reported == [
        *("PRIVATE_REGISTRY", "VERSION", "CUDA_VERSION"),
        *(str(bench.folder / "none.zip"), folders, "BUILDER"),
    ]
    assert "expected ubuntu24.04, found rhel8, rhel9, ubuntu20.04, ubuntu22.04" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PRIVATE_REGISTRY", "https://registry.example.com", "leave https:// out"),
        ("PRIVATE_REGISTRY", "registry.example.com/", "found '' in 'registry.example.com/'"),
        ("PRIVATE_REGISTRY", "registry.example.com/Gpus", "found 'Gpus' in "),
        ("PRIVATE_REGISTRY", "registry.example.com/gpus:1", "found 'gpus:1' in "),
        ("PRIVATE_REGISTRY", "registry.example.com:x/gpus", "found 'registry.example.com:x' in "),
        ("VERSION", "v510.73.06", "expected 510.73.06, found v510.73.06"),
        ("VERSION", "", "expected 510.73.06, found nothing"),
        ("VERSION", "510.85.03", f"is not the version of {DRIVER}: expected 510.73.06, found 510.85.03"),
        ("OS_TAG", "rhcos4.x", "rhcos4.x with a number for x"),
        ("OS_TAG", "rhcos", "found 'rhcos'"),
        ("OS_TAG", "../ubuntu22.04", "found '../ubuntu22.04'"),
        ("CUDA_VERSION", "11.7", "the three numbers"),
        ("BUILDER", "docker 'x", "can't be split into words"),
    ],
)
def test_an_invalid_variable_is_refused(bench: Bench, name: str, value: str, message: str) -> None:
    done = bench.build(bench.run_file(), **{name: value})
    assert (done.returncode, bench.calls()) == (2, [])
    assert "mistakes: 1" in done.stderr
    assert f"  {name}: " in done.stderr
    assert message in done.stderr


def test_a_registry_without_a_host_is_accepted_with_a_note(bench: Bench) -> None:
    done = bench.build(bench.run_file(), PRIVATE_REGISTRY="my/private/registry")
    assert done.returncode == 0
    assert "note: PRIVATE_REGISTRY names no host ('my' has no dot" in done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NVIDIA-Linux-x86_64-510.73.08-grid.run", "-grid.run is a guest driver"),
        ("NVIDIA-Linux-x86_64-510.73.06-vgpu-kvm-patch.run", "-patch.run a patch"),
        ("NVIDIA-Linux-aarch64-510.73.06-vgpu-kvm.run", "is not a host driver"),
    ],
)
def test_a_driver_that_is_not_for_hosts_is_refused(bench: Bench, name: str, message: str) -> None:
    done = bench.build(bench.run_file(name))
    assert done.returncode == 2
    assert message in done.stderr


def test_an_html_page_saved_as_the_driver_is_refused(bench: Bench) -> None:
    done = bench.build(bench.run_file(DRIVER, b"<html>Log in</html>"))
    assert done.returncode == 2
    assert "19 bytes that begin with b'<h'" in done.stderr


def test_a_bundle_of_guest_drivers_is_refused(bench: Bench) -> None:
    done = bench.build(bench.zip("Guest_Drivers/NVIDIA-Linux-x86_64-510.73.08-grid.run"))
    assert done.returncode == 2
    assert "found Guest_Drivers/NVIDIA-Linux-x86_64-510.73.08-grid.run" in done.stderr
    assert "NVIDIA-GRID-Linux-KVM-" in done.stderr


def test_a_bundle_with_two_drivers_needs_a_choice(bench: Bench) -> None:
    done = bench.build(bench.zip(f"Host_Drivers/{DRIVER}", f"Host_Drivers/{AIE}"))
    assert done.returncode == 2
    assert "unzip it, and name the .run file" in done.stderr


@pytest.mark.parametrize("content", [b"", b"<html>Log in</html>", b"PK\x03\x04"])
def test_a_file_that_is_no_zip_is_refused(bench: Bench, content: bytes) -> None:
    (bench.folder / "bundle.zip").write_bytes(content)
    done = bench.build(bench.folder / "bundle.zip")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "can't be read" in done.stderr


def test_a_damaged_bundle_is_found_before_any_build(bench: Bench) -> None:
    driver = SCRIPT + bytes(1 << 20)
    bundle = bench.folder / "bundle.zip"
    with zipfile.ZipFile(bundle, "w") as made:
        made.writestr(f"Host_Drivers/{DRIVER}", driver)
    content = bytearray(bundle.read_bytes())
    content[content.index(SCRIPT) + len(driver) - 1] ^= 1
    bundle.write_bytes(content)
    done = bench.build(bundle)
    assert (done.returncode, bench.calls(), "Traceback" in done.stderr) == (1, [], False)
    assert list(bench.scratch.iterdir()) == []
    assert "Bad CRC-32" in done.stderr


def test_paths_in_a_bundle_cannot_escape_and_links_are_no_drivers(bench: Bench) -> None:
    assert bench.build(bench.zip(f"../../{DRIVER}")).returncode == 0
    assert not (bench.folder.parent / DRIVER).exists()
    with zipfile.ZipFile(bench.folder / "bundle.zip", "w") as bundle:
        link = zipfile.ZipInfo(DRIVER)
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        bundle.writestr(link, "/etc/passwd")
    assert bench.build(bench.folder / "bundle.zip").returncode == 2


@pytest.mark.parametrize("inside", ["", "vgpu-manager", "vgpu-manager/ubuntu22.04"])
def test_a_wrong_checkout_folder_is_refused(bench: Bench, inside: str) -> None:
    bench.tree = bench.tree / inside if inside else bench.folder / "none"
    done = bench.build(bench.run_file())
    assert done.returncode == 2
    assert "is not a checkout of the driver container repository" in done.stderr


def test_a_dockerfile_without_a_cuda_version_argument_is_reported(bench: Bench) -> None:
    bench.add_folder("ubuntu24.04", "FROM base\n")
    done = bench.build(bench.run_file(), OS_TAG="ubuntu24.04")
    assert done.returncode == 0
    assert "so CUDA_VERSION has no effect" in done.stderr
    assert json.dumps(bench.calls()[0].arguments).count("CUDA_VERSION=11.7.1") == 1
