"""A kubelet that is stopped, has another name or another folder leaves traces; a host without them has no kubelet."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from gpuvirt.agent.change.changehost import Inputs
from gpuvirt.agent.known.nokubelet import KubeletTrace, prove
from gpuvirt.cli.podaccount import AllocationReader
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.hardware.usage.processes import INITIAL_NAMESPACE, read_kubelets
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath, HostRoots, KubeletPaths
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.files.processes import Process
from gpuvirt_sim.files.tree import Link, constant
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import change_drivers, change_host_in

POD = "8a5c1b0e-7d43-4f0e-9a53-0d7b1f9c2e11"
A10 = PciAddress("0000:65:00.0")
CHECKPOINT = "device-plugins/kubelet_internal_checkpoint"


@pytest.fixture
def kernel() -> SimKernel:
    """A host whose GPU has its native driver, and no process."""
    kernel = build_host(load_host("2xA10"))
    kernel.rebind(A10, "nvidia")
    return kernel


def bind(kernel: SimKernel, folder: Path) -> str | None:
    """Bind a GPU to vfio-pci as the command does; return what an unknown account has seen, None where it is bound."""
    account = AllocationReader(kernel, HostRoots.under(folder), KubeletPaths(folder / "k"), ledgers=())
    change_host = change_host_in(folder, kernel, SimTools(kernel))
    reasons = change_drivers(
        change_host, UnitId(A10), {A10: DesiredDriver.PASSTHROUGH}, Inputs(account.account, readings=account.readings)
    )
    is_bound = kernel.pci.functions[A10].driver == "vfio-pci"
    if not reasons:
        assert is_bound
        return None
    assert not is_bound
    assert {reason.code for reason in reasons} == {ReasonCode.ALLOCATIONS_UNKNOWN}
    return "; ".join(str(reason.seen) for reason in reasons)


def start(kernel: SimKernel, command: str, *arguments: str) -> Process:
    process = kernel.start_process(command)
    kernel.tree.place(HostPath(f"/proc/{process.pid}/cmdline"), constant("\0".join(arguments)))
    return process


def place(kernel: SimKernel, path: str, content: str = "") -> None:
    kernel.tree.place(HostPath(path), constant(content))


@pytest.mark.parametrize("has_folder", [False, True])
@pytest.mark.parametrize(
    "groups",
    [
        "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod8a5c.slice/cri-containerd-5ca1ab1e.scope",
        "0::/kubepods/besteffort/pod8a5c/5ca1ab1e",
        "0::/system.slice/docker-c0ffee.scope/kubelet.slice/kubelet-kubepods.slice/x.scope",
        "12:devices:/kubepods/burstable/pod8a5c/5ca1ab1e\n1:name=systemd:/init.scope\n0::/",
        "0::/../../kubepods.slice/x.scope",
    ],
)
def test_a_process_of_a_pod_shows_a_kubelet_that_is_stopped(
    kernel: SimKernel, tmp_path: Path, groups: str, *, has_folder: bool
) -> None:
    if has_folder:
        (tmp_path / "k").mkdir()
    process = kernel.start_process("sleep")
    place(kernel, f"/proc/{process.pid}/cgroup", groups)
    seen = bind(kernel, tmp_path)
    assert seen is not None
    assert f"process {process.pid} (sleep) is in the control group /" in seen
    kernel.end_vm(process)
    assert bind(kernel, tmp_path) is None


@pytest.mark.parametrize(
    "arguments",
    [
        ("/usr/bin/containerd-shim-runc-v2", "-namespace", "k8s.io", "-id", "5ca1ab1e", "-address", "/run/c.sock"),
        ("/usr/bin/containerd-shim-runsc-v1", "--namespace=k8s.io", "-id", "5ca1ab1e"),
        ("/opt/kata/bin/containerd-shim-kata-v2", "-namespace", "k8s.io", "-id", "5ca1ab1e"),
        ("/usr/bin/containerd-shim-kata-v2", "-namespace", "default", "-publish-binary", "/usr/bin/crio", "-id", "5"),
        ("/usr/bin/conmon", "-b", "/run/containers/storage/x", "--exit-dir", "/var/run/crio/exits", "-c", "5ca1ab1e"),
        ("/usr/bin/conmon", "-c", "5ca1ab1e", "-l", "/var/log/pods/default_cuda_8a5c/main/0.log"),
    ],
)
def test_the_process_that_keeps_a_container_of_a_pod_shows_a_kubelet(
    kernel: SimKernel, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    process = start(kernel, "shim", *arguments)
    seen = bind(kernel, tmp_path)
    assert seen is not None
    assert f"process {process.pid} (shim) keeps a container of a pod" in seen


def test_the_mounts_of_a_container_show_a_kubelet_without_a_control_group(kernel: SimKernel, tmp_path: Path) -> None:
    """With `cgroupsPerQOS: false`, and a runtime that has no process for each container."""
    process = kernel.start_process("python3")
    mount = f"613 601 254:1 /data/kubelet/pods/{POD}/etc-hosts /etc/hosts rw,relatime - ext4 /dev/vda1 rw"
    place(kernel, f"/proc/{process.pid}/mountinfo", mount)
    seen = bind(kernel, tmp_path)
    assert seen is not None
    assert f"process {process.pid} (python3) has files of pod {POD} mounted" in seen


@pytest.mark.parametrize("entry", [CHECKPOINT, f"pods/{POD}/etc-hosts"])
@pytest.mark.parametrize(
    "folder",
    [
        "/var/lib/kubelet",
        "/var/snap/microk8s/common/var/lib/kubelet",
        "/var/lib/k0s/kubelet",
        "/var/lib/rancher/k3s/agent/kubelet",
        "/var/lib/edged",
    ],
)
def test_the_usual_folder_of_another_kubelet_shows_it(
    kernel: SimKernel, tmp_path: Path, folder: str, entry: str
) -> None:
    place(kernel, f"{folder}/{entry}")
    seen = bind(kernel, tmp_path)
    assert seen is not None
    assert f"{folder}/" in seen


@pytest.mark.parametrize(
    "arguments", [("node-agent", "--root-dir=/data/k"), ("node-agent", "--root-dir", "/data/k", "--v=2")]
)
def test_the_folder_that_a_running_process_names_shows_a_kubelet(
    kernel: SimKernel, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """The folder is the one that the process sees."""
    process = start(kernel, "node-agent", *arguments)
    place(kernel, f"/containers/5/data/k/{CHECKPOINT}")
    assert bind(kernel, tmp_path) is None
    kernel.rebind(A10, "nvidia")
    kernel.tree.place(HostPath(f"/proc/{process.pid}/root"), Link("../../containers/5"))
    seen = bind(kernel, tmp_path)
    assert seen is not None
    assert "/data/k/device-plugins" in seen


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("/etc/systemd/system/kubelet.service", "[Service]\nExecStart=/usr/bin/kubelet --root-dir=/data/k --v=2"),
        ("/usr/lib/systemd/system/node.service", 'ExecStart=/opt/node "--root-dir" "/data/k"'),
        ("/lib/systemd/system/k0sworker.service", "ExecStart=/usr/bin/k0s worker --kubelet-root-dir=/data/k"),
        ("/run/systemd/transient/kubelet.service", "ExecStart=/usr/bin/kubelet --root-dir /data/k"),
        (
            "/etc/systemd/system/kubelet.service.d/10-kubeadm.conf",
            'Environment="KUBELET_EXTRA_ARGS=--root-dir=/data/k"',
        ),
        ("/etc/default/kubelet", "KUBELET_EXTRA_ARGS='--root-dir=/data/k'"),
        ("/etc/sysconfig/kubelet", "KUBELET_EXTRA_ARGS=--root-dir=/data/k"),
        ("/var/lib/kubelet/kubeadm-flags.env", 'KUBELET_KUBEADM_ARGS="--root-dir=/data/k"'),
        ("/etc/rancher/k3s/config.yaml", 'kubelet-arg:\n- "root-dir=/data/k"'),
        ("/etc/rancher/rke2/config.yaml", "kubelet-arg: [root-dir=/data/k]"),
        ("/etc/kubeedge/config/edgecore.yaml", "modules:\n  edged:\n    rootDirectory: /data/k"),
        ("/var/snap/microk8s/current/args/kubelet", "--cert-dir=${SNAP_DATA}/certs\n--root-dir=/data/k"),
    ],
)
def test_the_folder_that_a_configuration_names_shows_a_kubelet(
    kernel: SimKernel, tmp_path: Path, file: str, content: str
) -> None:
    place(kernel, file, content)
    assert bind(kernel, tmp_path) is None, "an installed kubelet that has never run is no kubelet"
    kernel.rebind(A10, "nvidia")
    kernel.tree.make(HostPath(f"/data/k/pods/{POD}"))
    seen = bind(kernel, tmp_path)
    assert seen is not None
    assert f"/data/k/pods/{POD}" in seen


def test_links_of_the_host_are_followed_as_on_the_host(kernel: SimKernel, tmp_path: Path) -> None:
    """A container has another root than the host, where an absolute link leads elsewhere."""
    kernel.tree.place(HostPath("/proc/1/root"), Link("../../host"))
    kernel.tree.place(HostPath("/host/var"), Link("/mnt/var"))
    kernel.tree.place(HostPath("/host/mnt/var/lib/kubelet"), Link(".././..//../data/k"))
    kernel.tree.place(HostPath("/host/etc/systemd/system/node.service"), Link("/opt/node.service"))
    assert bind(kernel, tmp_path) is None
    kernel.rebind(A10, "nvidia")
    place(kernel, f"/host/data/k/{CHECKPOINT}")
    assert "/var/lib/kubelet/device-plugins" in (bind(kernel, tmp_path) or "")
    kernel.tree.remove(HostPath("/host/data/k"))
    place(kernel, "/host/opt/node.service", "ExecStart=/opt/node --root-dir=/data/n")
    place(kernel, f"/host/data/n/{CHECKPOINT}")
    assert "/data/n/device-plugins" in (bind(kernel, tmp_path) or "")


@pytest.mark.parametrize(
    ("command", "arguments", "executable"),
    [
        ("edgecore", (), None),
        ("hyperkube", (), None),
        ("kubelet-1.31.2", (), None),
        ("kubelet-v1.31.1", (), None),
        ("k0s", (), None),
        ("rke2", (), None),
        ("microshift", (), None),
        (".kubelet-wrappe", (), None),
        ("exe", ("/opt/bin/kubelet", "--v=2"), None),
        ("exe", ("/usr/local/bin/k3s server",), None),
        ("exe", ("/opt/my node/kubelet",), None),
        ("node-agent", ("node-agent",), "/opt/bin/kubelet-1.31.2"),
        ("node-agent", ("node-agent",), "/usr/bin/kubelet (deleted)"),
    ],
)
def test_a_kubelet_of_another_name_runs(
    kernel: SimKernel, command: str, arguments: tuple[str, ...], executable: str | None
) -> None:
    """Otherwise the record alone would be the account while its API does not answer."""
    process = start(kernel, command, *arguments)
    if executable is not None:
        kernel.tree.place(HostPath(f"/proc/{process.pid}/exe"), Link(executable))
    assert read_kubelets(kernel) == (process.pid,)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("name", ["comm", "cmdline", "exe"])
def test_a_process_whose_name_cannot_be_read_may_be_a_kubelet(
    kernel: SimKernel, tmp_path: Path, name: str, number: int
) -> None:
    process = kernel.start_process("sleep")
    assert read_kubelets(kernel) == ()
    kernel.faults.fail(HostPath(f"/proc/{process.pid}/{name}"), number)
    found = read_kubelets(kernel)
    assert isinstance(found, Unread)
    assert found.errno == number
    seen = bind(kernel, tmp_path)
    assert seen is not None
    assert f"/proc/{process.pid}/{name}: {errno.errorcode[number]}" in seen


@pytest.mark.parametrize("name", ["comm", "cmdline", "exe", "cgroup", "mountinfo"])
def test_a_process_that_ends_while_it_is_read_is_no_kubelet(kernel: SimKernel, tmp_path: Path, name: str) -> None:
    process = kernel.start_process("sleep")
    kernel.faults.fail(HostPath(f"/proc/{process.pid}/{name}"), errno.ESRCH)
    assert read_kubelets(kernel) == ()
    assert bind(kernel, tmp_path) is None


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("/proc/4001/cgroup", errno.EACCES),
        ("/proc/4001/mountinfo", errno.EACCES),
        ("/proc/1/root/var", errno.EACCES),
        ("/proc/1/root/var/lib/kubelet/pods", errno.EINVAL),
        ("/proc/1/root/etc/systemd/system", errno.EINVAL),
        ("/proc/1/root/etc/systemd/system/node.service", errno.EINVAL),
        ("/proc/1/root/etc/default/kubelet", errno.EINVAL),
    ],
)
def test_traces_that_cannot_be_read_are_not_absent(kernel: SimKernel, tmp_path: Path, path: str, number: int) -> None:
    """EINVAL says of a link that it is none, and fails the read that follows."""
    assert kernel.start_process("sleep").pid == 4001
    place(kernel, "/etc/systemd/system/node.service")
    kernel.faults.fail(HostPath(path), number)
    seen = bind(kernel, tmp_path)
    assert seen is not None
    assert f"{path}: {errno.errorcode[number]}" in seen


@pytest.mark.parametrize("name", ["loop", "loop/k", "file"])
def test_a_folder_of_the_kubelet_that_cannot_be_read_is_not_empty(kernel: SimKernel, tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    found = prove(kernel, KubeletPaths(tmp_path / name), tuple)
    assert found == KubeletTrace(f"{tmp_path / name} has files", is_elsewhere=False)


def test_a_link_to_itself_is_not_absent(kernel: SimKernel, tmp_path: Path) -> None:
    kernel.tree.place(HostPath("/proc/1/root"), Link("../../host"))
    kernel.tree.place(HostPath("/host/var/lib/kubelet"), Link("/var/lib/kubelet"))
    assert "/var/lib/kubelet/kubeadm-flags.env: ELOOP" in (bind(kernel, tmp_path) or "")


def test_a_docker_host_has_no_kubelet(kernel: SimKernel, tmp_path: Path) -> None:
    start(kernel, "dockerd", "/usr/bin/dockerd", "-H", "fd://", "--data-root=/data/docker")
    start(kernel, "containerd", "/usr/bin/containerd")
    start(kernel, "containerd-shim", "/usr/bin/containerd-shim-runc-v2", "-namespace", "moby", "-id", "c0ffee")
    start(kernel, "conmon", "/usr/bin/conmon", "-c", "c0ffee", "--exit-command", "/usr/bin/podman")
    container = start(kernel, "python3", "python3")
    place(kernel, f"/proc/{container.pid}/cgroup", "0::/system.slice/docker-c0ffee.scope")
    mount = "613 601 254:1 /data/docker/containers/c0ffee/hosts /etc/hosts rw,relatime - ext4 /dev/vda1 rw"
    place(kernel, f"/proc/{container.pid}/mountinfo", mount)
    assert bind(kernel, tmp_path) is None


def test_a_host_after_kubeadm_reset_has_no_kubelet(kernel: SimKernel, tmp_path: Path) -> None:
    """The reset empties the kubelet's folder, and leaves the packages with their units, and empty control groups."""
    for folder in (tmp_path / "k", tmp_path / "k/nothing"):
        folder.mkdir()
    (tmp_path / "k/nothing").rmdir()
    kernel.tree.make(HostPath("/var/lib/kubelet"))
    kernel.tree.make(HostPath("/sys/fs/cgroup/kubepods.slice/kubepods-besteffort.slice"))
    place(kernel, "/usr/lib/systemd/system/kubelet.service", "ExecStart=/usr/bin/kubelet")
    flags = "EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env\nEnvironmentFile=-/etc/default/kubelet"
    place(kernel, "/usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf", flags)
    start(kernel, "crio", "/usr/bin/crio")
    assert bind(kernel, tmp_path) is None


def test_a_real_process_is_a_kubelet_by_its_program(tmp_path: Path) -> None:
    """A process with another command name runs a program whose file has the name of a kubelet."""
    program, roots = tmp_path / "kubelet-1.31.2", HostRoots.under(Path("/"))
    program.symlink_to(sys.executable)
    proc = tmp_path / "proc"
    (proc / "1/ns").mkdir(parents=True)
    (proc / "1/ns/pid").symlink_to(INITIAL_NAMESPACE)
    read = "import sys; open('/proc/self/comm', 'w').write('sleep'); print(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([str(program), "-c", read], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (proc / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        roots = HostRoots(roots.sys, roots.dev, proc, roots.run, roots.root, roots.system)
        assert (proc / f"{process.pid}/comm").read_text() == "sleep\n"
        assert read_kubelets(RealKernel(roots)) == (process.pid,)
