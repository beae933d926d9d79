"""Archives contain no secrets: of any file of a host, only the settings that affect devices are kept."""

import gzip
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpuvirt.hardware.archives.redaction import Discreet
from gpuvirt.paths import HostPath
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.devices.platform import PlatformSpec
from tests.cli.commandline import called
from tests.diagnosis.doctor.sickhost import host

PLANTED = "hunter2"
AUTH = f'[plugins."io.containerd.grpc.v1.cri".registry.configs."r".auth]\npassword = "{PLANTED}"\n'
CONTAINERD = f"""\
version = 2 # {PLANTED}
imports = ["/etc/containerd/conf.d/*.toml", "{PLANTED} x"]
root = "{PLANTED}"
{AUTH}
[plugins."io.containerd.grpc.v1.cri"]
enable_cdi = true
cdi_spec_dirs = ["/etc/cdi", "x {PLANTED}"]
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{PLANTED}]
"""
FILES = {
    "/proc/cmdline": f"intel_iommu=on nomodeset token={PLANTED} talos.config=https://{PLANTED}@x -- {PLANTED}",
    "/proc/cpuinfo": f"processor\t: 0\nSerial\t\t: {PLANTED}\nflags\t\t: vmx\n\nprocessor\t: 1\nSerial: {PLANTED}\n",
    "/etc/os-release": f'ID=debian\nHOME_URL="https://{PLANTED}"\nVERSION_ID="12"\nID_LIKE="$({PLANTED})"\n',
    "/etc/modprobe.d/vfio.conf": f"""\
# {PLANTED}
options vfio-pci ids=10de:2236 password={PLANTED}
options vfio-pci ids={PLANTED}
options wireguard key={PLANTED}
install vfio-pci /bin/false {PLANTED}
install nvidia curl {PLANTED}
softdep nvidia pre: {PLANTED} vfio-pci
blacklist nouveau {PLANTED}
alias x {PLANTED}
{PLANTED}
""",
    "/run/modprobe.d/more.conf": f"options nvidia \\\n {PLANTED}",
    "/etc/containerd/config.toml": CONTAINERD,
    "/etc/containerd/conf.d/auth.toml": AUTH,
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml": f"= {PLANTED}",
    "/etc/crio/crio.conf": f'[crio.image]\nglobal_auth_file = "{PLANTED}"\n',
    "/etc/crio/crio.conf.d/10-auth.conf": f'[crio.runtime]\ndefault_env = ["TOKEN={PLANTED}"]\n',
    "/etc/default/grub": f"GRUB_CMDLINE_LINUX='{PLANTED}'",
    "/etc/kernel/cmdline": PLANTED,
    "/boot/loader/entries/linux.conf": f"options {PLANTED}",
    "/proc/1/environ": f"TOKEN={PLANTED}",
    "/proc/1/cmdline": PLANTED,
    "/lib/modules/6.8.0-31-generic/modules.dep": f"kernel/vfio-pci.ko: kernel/{PLANTED}.ko\nextra/{PLANTED}.ko:\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "host"
    export(host(PlatformSpec(files=FILES)), folder)
    return folder


def files_of(archive: bytes) -> bytes:
    return gzip.decompress(archive)


@pytest.mark.parametrize("hiding", [(), ("--hide-names",)])
def test_an_archive_contains_no_secrets(root: Path, tmp_path: Path, hiding: tuple[str, ...]) -> None:
    """Neither in the copy of the host nor in doctor's report."""
    planted = [path for path in FILES if PLANTED in (root / path.lstrip("/")).read_text()]
    assert planted == list(FILES)
    done = called("support", "--host-root", str(root), "-o", "-", *hiding, cwd=tmp_path, environment={"TOKEN": PLANTED})
    assert done.returncode == 0, done.stderr
    assert PLANTED.encode() not in files_of(done.stdout)
    assert PLANTED.encode() not in done.stderr


KEPT: Mapping[str, str] = {
    "/proc/cpuinfo": "processor\t: 0\nflags\t\t: vmx\n\n",
    "/etc/os-release": 'ID=debian\nVERSION_ID="12"\n',
    "/etc/modprobe.d/vfio.conf": """\
options vfio-pci ids=10de:2236 (left-out)
options vfio-pci (left-out)
install vfio-pci /bin/false (left-out)
install nvidia (left-out) (left-out)
softdep nvidia pre: (left-out) vfio-pci
blacklist nouveau
""",
    "/run/modprobe.d/more.conf": "options nvidia (left-out)\n",
    "/etc/containerd/config.toml": """\
version = 2
imports = ["/etc/containerd/conf.d/*.toml", "(left-out)"]
[plugins."io.containerd.grpc.v1.cri"]
enable_cdi = true
cdi_spec_dirs = ["/etc/cdi", "(left-out)"]
""",
    "/etc/containerd/conf.d/auth.toml": '[plugins."io.containerd.grpc.v1.cri"]\n',
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml": "(left-out) no TOML\n",
    "/etc/crio/crio.conf": "",
    "/etc/crio/crio.conf.d/10-auth.conf": '[crio."runtime"]\n',
    "/lib/modules/6.8.0-31-generic/modules.dep": "kernel/vfio-pci.ko:\n",
    "/etc/kernel/anything": "(left-out) no TOML\n",
}


@pytest.mark.parametrize("path", KEPT)
def test_files_are_redacted(path: str) -> None:
    """A file of an unknown kind is left out."""
    kernel = host(PlatformSpec(files=FILES | {"/etc/kernel/anything": PLANTED}))
    assert Discreet(kernel).read(HostPath(path)).decode() == KEPT[path]


def test_redacting_twice_changes_nothing() -> None:
    """An imported host is read through the same redaction."""
    once = host(PlatformSpec(files=FILES))
    paths = [HostPath(path) for path in FILES if not path.startswith(("/proc/1/", "/boot", "/etc/kernel", "/etc/def"))]
    reported = {path: Discreet(once).read(path).decode() for path in paths}
    twice = host(PlatformSpec(files={str(path): text for path, text in reported.items()}))
    assert {path: Discreet(twice).read(path).decode() for path in paths} == reported
