"""The cluster: starts its programs in the order of their dependencies until pods can run, and stops them."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.cache import cache_root
from lab.cluster import footprint, images, leftovers, settings
from lab.cluster.api import Api
from lab.cluster.binaries import binaries

READY_WITHIN_S = 120.0
STOP_WITHIN_S = 10.0
KUBELET_ROOT = Path("/var/lib/kubelet")
"""Not configurable, because device plugins expect the kubelet there."""


class ClusterError(Exception):
    """The cluster can't be started; the text has the program and its log."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """One node with its control plane, with all files below one folder."""

    folder: Path
    binaries: Path
    children: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict, compare=False)
    """The programs that this process has started; another process may stop them by the files in `log`."""

    @property
    def audit_log(self) -> Path:
        """The requests of one namespace's service accounts to the API server: one JSON event per line."""
        return self.folder / settings.AUDIT_LOG

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.folder / "kubeconfig"

    @property
    def api(self) -> Api:
        """The API server, for requests without kubectl."""
        return Api(self.folder / "certs/apiserver.crt")

    def up_control_plane(self) -> None:
        """Start the API server and etcd without controllers; raise ClusterError."""
        if leftovers.another_kubelet(self.folder):
            raise ClusterError("a kubelet already runs on this computer; the lab needs /var/lib/kubelet for itself")
        if leftovers.kubelet_of_its_own(self.folder):
            raise ClusterError("/var/lib/kubelet has files of a kubelet of this computer; the lab would overwrite them")
        self.down()
        settings.write_all(self.folder)
        footprint.note(self.folder)
        leftovers.make_kubelet_folder(self.folder)
        leftovers.make_bridge()
        _share_mounts()
        self.start("etcd", "etcd", *_etcd(self.folder))
        self.until(lambda: self._answers("http://127.0.0.1:12379/health"), "etcd")
        self.start_api_server()

    def up(self) -> None:
        """Start everything; raise ClusterError."""
        self.up_control_plane()
        self._start_controllers()
        self.start("containerd", "containerd", "-c", "containerd.toml")
        self.until(lambda: self.containerd("version").returncode == 0, "containerd")
        self._import_images()
        self.start_kubelet()
        self.until(self._node_is_ready, "kubelet")
        self.start("proxy", "kube-proxy", *_PROXY)  # after the kubelet: it waits up to 30 s for its node

    def down(self) -> None:
        """Stop everything, and remove what it has left."""
        self.stop("kubelet")
        leftovers.end_containers(self.containerd)
        for name in ("containerd", "proxy", "scheduler", "controllers", "apiserver", "etcd", "hardware"):
            self.stop(name)
        created = footprint.noted(self.folder)
        leftovers.clear(self.folder)
        footprint.remove(created)

    def start_api_server(self) -> None:
        """Start the API server, and wait until it is ready."""
        self.start("apiserver", "kube-apiserver", *_api_server(self.folder))
        self.until(lambda: self._answers(f"https://{settings.ADDRESS}:{settings.PORT}/readyz"), "apiserver")

    def restart_after_outage(self) -> None:
        """Start the API server again, and restart its clients: some have ended meanwhile, others wait for minutes."""
        self.start_api_server()
        for name in ("controllers", "scheduler", "kubelet", "proxy"):
            self.stop(name)
        self._start_controllers()
        self.start_kubelet()
        self.until(self._node_is_ready, "kubelet")
        self.start("proxy", "kube-proxy", *_PROXY)

    def _start_controllers(self) -> None:
        self.start("controllers", "kube-controller-manager", *_controllers(self.folder))
        self.start("scheduler", "kube-scheduler", "--kubeconfig=kubeconfig", "--leader-elect=false", "--secure-port=0")

    def start_kubelet(self) -> None:
        """Start the kubelet."""
        self.start("kubelet", "kubelet", *_kubelet(self.folder))

    def runs(self, name: str) -> bool:
        """Return whether a program runs."""
        pid_file = self.folder / "log" / f"{name}.pid"
        return pid_file.exists() and _alive(int(pid_file.read_text()))

    def stop(self, name: str) -> None:
        """Stop a program; do nothing where it does not run."""
        pid_file = self.folder / "log" / f"{name}.pid"
        if not pid_file.exists():
            return
        pid = int(pid_file.read_text())
        deadline = time.monotonic() + STOP_WITHIN_S
        number = signal.SIGTERM
        while _alive(pid):
            os.kill(pid, number)
            time.sleep(0.1)
            if time.monotonic() > deadline:
                number = signal.SIGKILL
        pid_file.unlink()
        if child := self.children.pop(name, None):
            child.wait()

    def kubectl(self, *arguments: str, given: str | None = None) -> "subprocess.CompletedProcess[str]":
        """Run kubectl as the administrator."""
        command = [str(self.binaries / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments]
        return subprocess.run(command, input=given, capture_output=True, text=True, check=False)

    def containerd(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run ctr, in the namespace of the kubelet's containers."""
        command = [str(self.binaries / "ctr"), "-a", f"{self.folder}/containerd.sock", "-n", "k8s.io", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def import_image(self, archive: Path) -> None:
        """Import an image on the node."""
        done = self.containerd("images", "import", str(archive))
        if done.returncode:
            raise ClusterError(f"{archive} can't be imported: {done.stderr}")

    def start(self, name: str, program: str, *arguments: str) -> None:
        """Start a program in the background; it has a log of its name, by which `stop` finds it."""
        search = f"{self.binaries}:{os.environ['PATH']}:/usr/sbin:/sbin"
        with (self.folder / "log" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [program, *arguments],
                executable=shutil.which(program, path=search),
                cwd=self.folder,
                env=os.environ | {"PATH": search},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.children[name] = process
        (self.folder / "log" / f"{name}.pid").write_text(str(process.pid))

    def until(self, met: Callable[[], bool], name: str) -> None:
        """Wait for what a program does; raise ClusterError with its log where it ends, or takes too long."""
        deadline = time.monotonic() + READY_WITHIN_S
        while not met():
            log = self.folder / "log" / f"{name}.log"
            if time.monotonic() > deadline or not _alive(int(log.with_suffix(".pid").read_text())):
                raise ClusterError(f"{name} is not ready; {log} ends with:\n{log.read_text()[-1500:]}")
            time.sleep(0.1)

    def _answers(self, url: str) -> bool:
        command = ["curl", "--silent", "--insecure", "--fail", "--max-time", "2", "--output", "/dev/null", url]
        return subprocess.run(command, check=False).returncode == 0

    def _node_is_ready(self) -> bool:
        ready = '{.status.conditions[?(@.type=="Ready")].status}'
        return self.kubectl("get", "node", settings.NODE, "-o", f"jsonpath={ready}").stdout == "True"

    def _import_images(self) -> None:
        layer = images.busybox(Path("/bin/busybox"))
        for name, command in (("pause:1", ["/bin/sleep", "1000000"]), ("box:1", ["/bin/sh", "-c"])):
            archive = self.folder / f"{name.partition(':')[0]}.tar"
            images.write_archive(archive, f"{images.PREFIX}/{name}", layer, command)
            self.import_image(archive)


def cluster() -> Cluster:
    """Return the lab's cluster, running or not; build the commands where they are missing."""
    return Cluster(cache_root() / "cluster", binaries())


def _share_mounts() -> None:
    """Make mounts of the host visible in pods that request it, as systemd does at boot."""
    subprocess.run(["mount", "--make-rshared", "/"], check=True)


def _alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _etcd(folder: Path) -> Sequence[str]:
    peer = "http://127.0.0.1:12380"
    client = "http://127.0.0.1:12379"
    return (
        f"--data-dir={folder}/etcd",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
    )


def _api_server(folder: Path) -> Sequence[str]:
    return (
        "--etcd-servers=http://127.0.0.1:12379",
        f"--secure-port={settings.PORT}",
        f"--bind-address={settings.ADDRESS}",
        f"--advertise-address={settings.ADDRESS}",
        f"--cert-dir={folder}/certs",
        "--token-auth-file=tokens.csv",
        f"--client-ca-file={settings.CLIENT_CA}.crt",
        "--service-account-key-file=sa.pub",
        "--service-account-signing-key-file=sa.key",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-cluster-ip-range={settings.SERVICES}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--admission-control-config-file=admission.yaml",
        "--allow-privileged=true",
        "--audit-policy-file=audit.yaml",
        f"--audit-log-path={settings.AUDIT_LOG}",
    )


def _controllers(folder: Path) -> Sequence[str]:
    return (
        "--kubeconfig=kubeconfig",
        "--service-account-private-key-file=sa.key",
        f"--root-ca-file={folder}/certs/apiserver.crt",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        "--secure-port=0",
    )


def _kubelet(folder: Path) -> Sequence[str]:
    return (
        f"--config={folder}/kubelet.yaml",
        "--kubeconfig=kubeconfig.node",
        f"--root-dir={KUBELET_ROOT}",
        f"--hostname-override={settings.NODE}",
        "--v=2",
    )


_PROXY = (
    "--kubeconfig=kubeconfig",
    "--proxy-mode=nftables",
    f"--hostname-override={settings.NODE}",
    f"--cluster-cidr={settings.PODS}",
    "--healthz-bind-address=127.0.0.1:10256",
    "--metrics-bind-address=127.0.0.1:10249",
    "--conntrack-max-per-core=0",
)
