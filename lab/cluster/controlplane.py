"""The control plane of a cluster: starts etcd, the API server and its controllers in this order, and stops them."""

import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from lab.cache import is_locked, locked
from lab.cluster import leftovers, settings
from lab.cluster.api import Api
from lab.cluster.places import Place

READY_WITHIN_S = 120.0
STOP_WITHIN_S = 10.0
CONTROL_PLANE = ("scheduler", "controllers", "apiserver", "etcd")
"""Its programs, in the order of their end."""


class ClusterError(Exception):
    """The cluster can't be started; the text has the program and its log."""


@dataclass(frozen=True)
class ControlPlane(ABC):
    """A control plane and one node, with all files below one folder."""

    clients: ClassVar[Sequence[str]]
    """The node's programs that are clients of the API server."""
    api_server_options: ClassVar[Sequence[str]] = ()
    """The additional options of the API server."""

    folder: Path
    binaries: Path
    place: Place
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
    def ca(self) -> Path:
        """The certificate of the API server."""
        return self.folder / "certs/apiserver.crt"

    @property
    def server(self) -> str:
        """The URL of the API server."""
        return f"https://{self.place.address}:{self.place.port}"

    @property
    def api(self) -> Api:
        """The API server, for requests without kubectl."""
        return Api(self.ca, self.place.address, self.place.port)

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Wait until no other run has the place, and keep it for the duration of the context."""
        with locked(self._alone()):
            yield

    def is_reserved(self) -> bool:
        """Return whether a run has the place."""
        return is_locked(self._alone())

    def _alone(self) -> Path:
        alone = self.folder.with_name(f"{self.place.folder}-alone")
        alone.mkdir(exist_ok=True)
        return alone

    @abstractmethod
    def start_node(self) -> None:
        """Start the programs of the node; raise ClusterError."""

    def start_control_plane(self) -> None:
        """Start the API server and etcd without controllers; raise ClusterError."""
        settings.write_control_plane(self.folder, self.place)
        leftovers.make_bridge(self.place)
        self.start("etcd", "etcd", *_etcd(self.folder, self.place))
        self.until(lambda: self._answers(f"{self.place.etcd}/health"), "etcd")
        self.start_api_server()

    def start_api_server(self) -> None:
        """Start the API server, and wait until it is ready."""
        self.start("apiserver", "kube-apiserver", *_api_server(self.folder, self.place), *self.api_server_options)
        self.until(lambda: self._answers(f"{self.server}/readyz"), "apiserver")

    def start_controllers(self) -> None:
        """Start the controllers and kube-scheduler."""
        self.start_controller_manager()
        self.start("scheduler", "kube-scheduler", "--kubeconfig=kubeconfig", "--leader-elect=false", "--secure-port=0")

    def start_controller_manager(self, *options: str) -> None:
        """Start the controllers, with more options."""
        self.start("controllers", "kube-controller-manager", *_controllers(self.folder), *options)

    def restart_after_outage(self) -> None:
        """Start the API server again, and restart its clients: some have ended meanwhile, others wait for minutes."""
        self.start_api_server()
        for name in ("controllers", "scheduler", *self.clients):
            self.stop(name)
        self.start_controllers()
        self.start_node()

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

    def node_is_ready(self) -> bool:
        """Return whether the node's programs report that it is ready."""
        ready = '{.status.conditions[?(@.type=="Ready")].status}'
        return self.kubectl("get", "node", settings.NODE, "-o", f"jsonpath={ready}").stdout == "True"

    def _answers(self, url: str) -> bool:
        command = ["curl", "--silent", "--insecure", "--fail", "--max-time", "2", "--output", "/dev/null", url]
        return subprocess.run(command, check=False).returncode == 0


def _alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _etcd(folder: Path, place: Place) -> Sequence[str]:
    peer = f"http://127.0.0.1:{place.etcd_port + 1}"
    return (
        f"--data-dir={folder}/etcd",
        "--unsafe-no-fsync",  # what a power failure would lose is thrown away anyway
        f"--listen-client-urls={place.etcd}",
        f"--advertise-client-urls={place.etcd}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
    )


def _api_server(folder: Path, place: Place) -> Sequence[str]:
    return (
        f"--etcd-servers={place.etcd}",
        f"--secure-port={place.port}",
        f"--bind-address={place.address}",
        f"--advertise-address={place.address}",
        f"--cert-dir={folder}/certs",
        "--token-auth-file=tokens.csv",
        f"--client-ca-file={settings.CLIENT_CA}.crt",
        "--service-account-key-file=sa.pub",
        "--service-account-signing-key-file=sa.key",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-cluster-ip-range={place.services}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--admission-control-config-file=admission.yaml",
        "--allow-privileged=true",
        "--kubelet-preferred-address-types=InternalIP",  # no DNS has the node's name, for kubectl logs and exec
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
