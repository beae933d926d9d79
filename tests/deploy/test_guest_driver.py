"""`deploy/kata/build-guest-driver`, with a stand-in for NVIDIA's installer; depmod and modprobe are real."""

import json
import os
import shutil
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).parent.parent.parent / "deploy/kata/build-guest-driver"
DRIVER = "NVIDIA-Linux-x86_64-570.133.10-grid.run"
RELEASE = "6.12.42-nvidia-gpu"

RUN = """#! /bin/sh
# As makeself's archives: --extract-only --target FOLDER.
[ "$1" = --extract-only ] && [ "$2" = --target ] || exit 9
mkdir "$3" && cp -r {content}/. "$3"
"""

INSTALLER = """#!{python}
import json, sys
from pathlib import Path
options = dict(option.partition("=")[::2] for option in sys.argv[1:])
Path({calls!r}).write_text(json.dumps(sys.argv[1:]))
if "--kernel-source-path" not in options or not Path(options["--kernel-source-path"]).is_dir():
    sys.exit("ERROR: no kernel sources")
modules = Path(options["--kernel-install-path"])
for name in {modules!r}:
    (modules / f"{{name}}.ko").write_bytes({module!r})
(Path(options["--utility-prefix"]) / "bin").mkdir()
(Path(options["--utility-prefix"]) / "bin/nvidia-gridd").write_text("x")
sys.exit({status})
"""
TEMPLATE = "# a template\nServerAddress=\nFeatureType=0\n"


def module() -> bytes:
    """Return the smallest module that depmod reads: an ELF file with a section .modinfo."""
    info, names = b"license=NVIDIA\0vermagic=6.12.42 SMP\0", b"\0.shstrtab\0.modinfo\0"
    header = 64
    sections = [
        (0, 0, 0, 0),
        (1, 3, header, len(names)),
        (11, 1, header + len(names), len(info)),
    ]
    table = header + len(names) + len(info)
    ident = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    elf = ident + struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, table, 0, header, 0, 0, 64, len(sections), 1)
    rows = (struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, at, size, 0, 0, 1, 0) for name, kind, at, size in sections)
    return elf + names + info + b"".join(rows)


class Bench:
    """A folder with a driver, a kernel's sources, and a builder of images."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = folder / "out/tree"
        self.calls = folder / "calls.json"
        self.content = folder / "content"
        self.content.mkdir()
        (self.content / "gridd.conf.template").write_text(TEMPLATE)
        self.source = folder / "linux"
        self.source.mkdir()
        (self.source / "Makefile").write_text("VERSION = 6\n")
        self.driver = folder / DRIVER
        self.driver.write_text(RUN.format(content=self.content))
        self.installs()

    def installs(self, modules: tuple[str, ...] = ("nvidia", "nvidia-drm"), status: int = 0) -> None:
        """Have the installer build these modules and end with a status."""
        installer = self.content / "nvidia-installer"
        text = INSTALLER.format(
            python=sys.executable, calls=str(self.calls), modules=modules, module=module(), status=status
        )
        installer.write_text(text)
        installer.chmod(0o755)

    def run(self, *more: str, driver: Path | None = None, version: str = "6.12.42") -> subprocess.CompletedProcess[str]:
        kernel = ("--kernel-source", str(self.source), "--kernel-version", version, "--kernel-suffix", "nvidia-gpu")
        command = [sys.executable, str(BUILD), str(driver or self.driver), str(self.tree), *kernel, *more]
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"  # noqa: TID251  handed on
        return subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": path})

    def builds(self, *more: str) -> subprocess.CompletedProcess[str]:
        done = self.run(*more)
        assert done.returncode == 0, done.stderr
        return done

    def options(self) -> list[str]:
        found: list[str] = json.loads(self.calls.read_text())
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_guest_finds_the_module_of_its_kernel_in_the_tree(bench: Bench) -> None:
    done = bench.builds("--host-version", "570.133.10")
    assert done.stdout == f"{bench.tree}: driver 570.133.10 for kernel {RELEASE}\n"
    modprobe = shutil.which("modprobe", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")  # noqa: TID251
    assert modprobe is not None
    found = subprocess.run(
        [modprobe, "-n", "--show-depends", "-d", str(bench.tree), "-S", RELEASE, "nvidia"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.split()[-1] == f"{bench.tree}/lib/modules/{RELEASE}/kernel/drivers/video/nvidia.ko"
    assert (bench.tree / "etc/nvidia/gridd.conf").read_text() == TEMPLATE
    assert (bench.tree / "etc/nvidia/ClientConfigToken").is_dir()
    assert (bench.tree / "bin/nvidia-gridd").exists()


def test_the_installer_gets_the_options_of_a_tree_for_another_kernel(bench: Bench) -> None:
    bench.builds()
    options = dict(option.partition("=")[::2] for option in bench.options())
    tree = options["--utility-prefix"]
    assert options == {
        "--ui": "none",
        "-q": "",
        "--kernel-source-path": str(bench.source),
        "--utility-prefix": tree,
        "--utility-libdir": "lib64",
        "--x-prefix": tree,
        "--x-library-path": f"{tree}/lib64",
        "--opengl-prefix": tree,
        "--kernel-install-path": f"{tree}/lib/modules/{RELEASE}/kernel/drivers/video",
        "--opengl-libdir": "lib64",
        "--override-file-type-destination": f"NVIDIA_MODPROBE:{tree}/bin",
        "--kernel-name": RELEASE,
        "--no-distro-scripts": "",
        "--no-check-for-alternate-installs": "",
        "--no-install-libglvnd": "",
        "--no-kernel-module-source": "",
        "--install-compat32-libs": "",
        "--compat32-prefix": tree,
        "--compat32-libdir": "lib",
    }
    assert not Path(tree).exists(), "the tree is built beside its place"


def test_each_option_of_the_installer_can_be_replaced_or_left_out(bench: Bench) -> None:
    bench.builds("--option=--compat32-libdir={tree}/lib32", "--option=--no-drm", "--without=--install-compat32-libs")
    options = bench.options()
    assert next(option for option in options if option.startswith("--compat32-libdir")).endswith("/tree/lib32")
    assert "--no-drm" in options
    assert "--install-compat32-libs" not in options


def test_the_licences_token_and_type_are_in_the_tree(bench: Bench) -> None:
    token = bench.folder / "client_configuration_token_1.tok"
    token.write_text("eyJhbGciOiJSUzI1NiJ9.eyJ.c2ln\n")
    done = bench.builds("--token", str(token), "--feature-type", "1", "--host-version", "570.133.10")
    assert "note: " not in done.stderr
    copied = bench.tree / "etc/nvidia/ClientConfigToken" / token.name
    assert (copied.read_text(), stat.S_IMODE(copied.stat().st_mode)) == ("eyJhbGciOiJSUzI1NiJ9.eyJ.c2ln\n", 0o744)
    assert (bench.tree / "etc/nvidia/gridd.conf").read_text() == TEMPLATE.replace("FeatureType=0", "FeatureType=1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host-version", "550.90.05"), "--host-version: is of an earlier branch than the guest driver"),
        (("--host-version", "new"), "--host-version: is not valid"),
        (("--kernel-suffix", "../x"), "--kernel-suffix: is not valid"),
        (("--kernel-source", "/nonexistent"), "--kernel-source: is not a kernel's sources"),
        (("--option", "no-drm"), "--option: is not an option"),
        (("--without=--x=3",), "--without: is not an option"),
        (("--token", "/nonexistent.tok"), "--token: can't be used"),
        (("--gridd-conf", "/nonexistent"), "--gridd-conf: can't be used"),
    ],
)
def test_wrong_inputs_change_nothing(bench: Bench, arguments: tuple[str, ...], message: str) -> None:
    done = bench.run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not bench.tree.exists()
    assert not bench.calls.exists()


@pytest.mark.parametrize("name", ["NVIDIA-Linux-x86_64-570.133.10-vgpu-kvm.run", "x.zip"])
def test_only_a_guest_driver_is_taken(bench: Bench, name: str) -> None:
    other = bench.folder / name
    other.write_text("#! /bin/sh\n")
    done = bench.run(driver=other)
    assert done.returncode == 2
    assert "is not a guest driver" in done.stderr
    assert bench.run(driver=bench.folder / DRIVER.replace("570", "571")).returncode == 2


def test_all_mistakes_are_reported_at_once(bench: Bench) -> None:
    done = bench.run("--option", "x", "--kernel-suffix", "a b", version="six")
    assert "mistakes: 3" in done.stderr


def test_a_folder_of_others_is_not_replaced(bench: Bench) -> None:
    bench.tree.mkdir(parents=True)
    (bench.tree / "mine").write_text("x")
    done = bench.run()
    assert done.returncode == 2
    assert "is not replaced" in done.stderr
    assert (bench.tree / "mine").exists()


@pytest.mark.parametrize(
    ("modules", "status", "why"),
    [((), 0, "has built no module nvidia"), (("nvidia",), 1, "ended with 1"), (("nvidia-drm",), 0, "no module nvidia")],
)
def test_a_failed_build_leaves_the_former_tree(bench: Bench, modules: tuple[str, ...], status: int, why: str) -> None:
    bench.builds()
    before = sorted(str(path) for path in bench.tree.rglob("*"))
    bench.installs(modules, status)
    done = bench.run()
    assert done.returncode == 1
    assert why in done.stderr
    assert sorted(str(path) for path in bench.tree.rglob("*")) == before
    assert sorted(path.name for path in bench.tree.parent.iterdir()) == ["tree"], "nothing is left behind"


def test_a_former_tree_is_replaced(bench: Bench) -> None:
    bench.builds()
    (bench.tree / "old").write_text("x")
    bench.builds()
    assert not (bench.tree / "old").exists()


def test_a_dry_run_prints_the_installers_command_alone(bench: Bench) -> None:
    done = bench.builds("--dry-run")
    assert done.stdout.startswith("nvidia-installer --ui=none -q --kernel-source-path=")
    assert f"--utility-prefix={bench.tree} " in done.stdout
    assert not bench.tree.exists()


def test_an_image_has_the_tree_as_its_root(bench: Bench) -> None:
    builder = bench.folder / "bin/docker"
    builder.parent.mkdir()
    builder.write_text(f'#! /bin/sh\necho "$@" > {bench.folder}/built\npwd >> {bench.folder}/built\ncat "$3"\n')
    builder.chmod(0o755)
    done = bench.builds("--image", "registry.example/guest-driver:570")
    arguments, folder = (bench.folder / "built").read_text().splitlines()
    assert arguments.startswith("build -f ")
    assert arguments.endswith("-t registry.example/guest-driver:570 .")
    assert folder == str(bench.tree)
    assert "COPY . /" in done.stderr


@pytest.mark.parametrize(
    ("content", "found"), [("", "an empty file"), (" \n", "an empty file"), ("<!DOCTYPE html>", "a web page")]
)
def test_an_empty_token_and_a_web_page_are_refused(bench: Bench, content: str, found: str) -> None:
    token = bench.folder / "client_configuration_token_1.tok"
    token.write_text(content)
    done = bench.run("--token", str(token))
    assert done.returncode == 2
    assert f"--token: is no token: expected the token of a licence server, found {found}" in done.stderr
    assert not bench.tree.exists()


def test_a_token_of_another_form_and_no_licence_are_noted(bench: Bench) -> None:
    token = bench.folder / "client_configuration_token_1.tok"
    token.write_text("text")
    assert "does not have the form of a token" in bench.builds("--token", str(token)).stderr
    assert "FeatureType=0 requests no licence" in bench.builds("--feature-type", "0").stderr
    assert "gridd.conf.template: FeatureType=0 requests no licence" in bench.builds().stderr
    assert "requests no licence" not in bench.builds("--feature-type", "2").stderr
