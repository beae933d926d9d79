"""The rings of tests around the simulators: what each requires and builds, and how to install what is missing.

Ring 1 requires only Python. A ring that can't run is skipped and reported at the end of the run; with CI=true it fails.
Each finds out from the host what it lacks, never from an option. What fails by chance refuses a change that is not to
blame, so the whole check has one order and fixed seeds, and runs of many pods are smaller there (`make
test-full-size`).

The kernel is Debian's own in QEMU's TCG, without KVM or an image; the lab writes the GPUs' ids into QEMU's memory,
since no option sets them, and `nvidia` is generated from the kernel's sample driver, whose result stays out of the tree
(GPL). The tests of real nodes were the longest chain of a run, since `/var/lib/kubelet` and `/dev/vfio` exist once:
half of them run on a second node, whose worker has namespaces of its own.
"""

import os
import platform
import shutil
import sys
from collections.abc import Callable
from ctypes.util import find_library
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lab.cache import cache_root
from lab.cluster.baseimage import base_image
from lab.cluster.binaries import binaries
from lab.cluster.golang import GO
from lab.cluster.helm import helm, helm_lacks
from lab.cluster.kwok import kwok
from lab.cluster.leftovers import another_kubelet, vfio_of_its_own
from lab.dra.allocator import lacks as allocator_lacks
from lab.dra.allocator import program as allocator_program
from lab.kata.witness import witness, witness_lacks
from lab.libvirt.host import PACKAGES as LIBVIRT_PACKAGES
from lab.libvirt.host import lacks as libvirt_lacks
from lab.vsphere.simulator import lacks as vsphere_lacks
from lab.vsphere.simulator import program as vsphere_program

SEARCH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # noqa: TID251
CLUSTER_TOOLS = ("etcd", "runc", "busybox", "ip", "nft", "curl", "openssl")
IMAGE_TOOLS = ("buildah", "debootstrap")


@dataclass(frozen=True, slots=True)
class Ring:
    """One ring."""

    what: str
    missing: Callable[[], str | None]
    """Returns why the ring can't run here; None where it can."""
    enable: str
    """The command that installs what is missing."""
    minutes: int
    """How long its tests take one after another, without its builds."""
    builds: tuple[Callable[[], object], ...] = ()
    """Each builds a program of the lab, or waits for its build; after that, it returns at once."""


def _mount_lacks() -> str | None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse can't be opened"
    if find_library("fuse3") is None:
        return "no libfuse3"
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        return "no fusermount3"
    return None


def _image_lacks() -> str | None:
    if os.geteuid() != 0:
        return "not root"
    tools = [name for name in IMAGE_TOOLS if shutil.which(name, path=SEARCH) is None]
    return f"no {', '.join(tools)}" if tools else None


def _cluster_lacks() -> str | None:
    if os.geteuid() != 0:
        return "not root"
    tools = [name for name in CLUSTER_TOOLS if shutil.which(name, path=SEARCH) is None]
    tools += [] if Path("/usr/lib/cni/bridge").exists() else ["CNI plugins"]
    if tools:
        return f"no {', '.join(tools)}"
    if (no_images := _image_lacks()) is not None:
        return no_images
    if vfio_of_its_own():
        return "the computer has VFIO devices of its own"
    if another_kubelet(cache_root()):
        return "a kubelet runs here"
    return _mount_lacks()


def _vsphere_missing() -> str | None:
    if find_spec("pyVmomi") is None:
        return "no pyVmomi"
    return "no openssl" if shutil.which("openssl", path=SEARCH) is None else vsphere_lacks()


def _libvirt_missing() -> str | None:
    if (lacking := libvirt_lacks()) is not None:
        return lacking
    if find_spec("libvirt") is None:
        return "no libvirt-python"
    return "no openssl" if shutil.which("openssl", path=SEARCH) is None else None


LAB_PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "modprobe": "kmod",
    "cpio": "cpio",
    "gcc": "gcc",
    "flex": "flex",
    "bison": "bison",
    "bc": "bc",
    "make": "make",
    "lspci": "pciutils",
    "xz": "xz-utils",
}
"""The programs that a guest requires on the host, with their Debian packages."""


def _kernel_lacks() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    if (release.get("ID"), release.get("VERSION_ID"), platform.machine()) != ("debian", "12", "x86_64"):
        return "needs Debian 12 on x86_64, whose kernel was measured"
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # noqa: TID251  the PATH of the user
    missing = [program for program in LAB_PROGRAMS if shutil.which(program, path=path) is None]
    missing += [] if Path("/usr/include/gelf.h").exists() else ["libelf-dev"]
    return f"no {', '.join(missing)}" if missing else None


def _kata_lacks() -> str | None:
    return "not root" if os.geteuid() != 0 else witness_lacks()


RINGS = {
    "cluster": Ring(
        "the agent on a real Kubernetes node",
        _cluster_lacks,
        "apt-get install etcd-server runc containernetworking-plugins busybox-static iproute2 nftables curl openssl"
        " buildah debootstrap",
        50,
        (binaries, kwok),
    ),
    "image": Ring(
        "gpuvirt's images, built from the Dockerfile",
        _image_lacks,
        "apt-get install --no-install-recommends buildah debootstrap",
        4,
        (base_image,),
    ),
    "helm": Ring(
        "the chart as helm renders and installs it",
        helm_lacks,
        "python -m lab.cluster build, which fetches a Go where there is none",
        2,
        (helm,),
    ),
    "kata": Ring(
        "Kata's CDI library, which finds a pod's devices",
        _kata_lacks,
        f"python -m lab.kata as root, with a Go of version {'.'.join(map(str, GO))} or later",
        1,
        (witness,),
    ),
    "dra": Ring(
        "Kubernetes' own allocator of claims",
        allocator_lacks,
        "python -m lab.dra, which fetches a Go where there is none",
        1,
        (allocator_program,),
    ),
    "vsphere": Ring(
        "a simulated vCenter",
        _vsphere_missing,
        "pip install pyvmomi; python -m lab.vsphere, which fetches a Go where there is none",
        3,
        (vsphere_program,),
    ),
    "libvirt": Ring(
        "a host with libvirt and QEMU",
        _libvirt_missing,
        f"apt-get install --no-install-recommends {' '.join(LIBVIRT_PACKAGES)} gcc libvirt-dev pkg-config openssl;"
        " pip install libvirt-python",
        2,
    ),
    "mount": Ring("a simulated host as a mounted file system", _mount_lacks, "apt-get install fuse3; modprobe fuse", 7),
    "kernel": Ring(
        "a real Linux kernel in a guest (lab/kernel)",
        _kernel_lacks,
        f"apt-get install --no-install-recommends libelf-dev {' '.join(sorted(LAB_PROGRAMS.values()))}",
        15,
    ),
}


def main() -> None:
    """Say what `make test-rings` is about to start here, how long it takes, and what is skipped."""
    for ring in RINGS.values():
        if (missing := ring.missing()) is not None:
            print(f"skipped: {ring.what}: {missing}; to run it: {ring.enable}")
        else:
            print(f"starts:  {ring.what}, {ring.minutes} min")
    print(
        "The first run also fetches and builds what the rings need, 20 min (make lab-prepare). All end with the tests."
    )


if __name__ == "__main__":
    main()
