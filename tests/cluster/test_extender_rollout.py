"""The chart's extender in the cluster: helm waits for it, upgrades and drains keep it, and one replica serves."""

import json
import logging
import socket
import ssl
import subprocess
import time
from base64 import b64encode
from contextlib import suppress
from pathlib import Path

import pytest

from gpuvirt.extender.process import TERMS
from tests.cluster.chartlab import NAMESPACE, Install
from tests.cluster.extenderlab import CLOCK, until
from tests.cluster.extenderservice import EXTENDER, QUESTION, is_of_leader
from tests.web.certificates import Authority

pytestmark = [
    pytest.mark.ring("cluster"),
    pytest.mark.ring("helm"),
    pytest.mark.xdist_group("cluster"),
]

log = logging.getLogger(__name__)

SERVER = f"{EXTENDER}.{NAMESPACE}.svc"
SECRET = "extender-cert"  # noqa: S105  the name of a Secret
LONGEST_QUESTION_S = 1.2
SELECTOR = "app.kubernetes.io/component=extender"


class Release:
    """A release of the chart whose extender has a certificate, and a client outside the cluster's pods."""

    def __init__(self, user: Install, folder: Path) -> None:
        self.user = user
        self.folder = folder
        self.authority = Authority(folder)
        user.kubectl("create", "namespace", NAMESPACE)
        self.write_secret("first")
        self.name = user.installed("extender.enabled=true", f"extender.tls.secretName={SECRET}")
        self.address = user.get(f"service/{EXTENDER}", ".spec.clusterIP")

    def write_secret(self, name: str) -> None:
        """Write the Secret with a new certificate, whose files have the name."""
        pair = self.authority.server(name, alternatives=f"DNS:{SERVER}")
        files = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": self.authority.certificate}
        data = {key: b64encode(file.read_bytes()).decode() for key, file in files.items()}
        metadata = {"name": SECRET, "namespace": NAMESPACE}
        self.user.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})

    def asked(self) -> tuple[bytes, bytes]:
        """Return an answer of the replica to which the cluster IP leads, and its certificate (DER); else empty.

        The certificate is checked as by kube-scheduler: the connection is made to an address, the check by a name.
        """
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        with (
            suppress(OSError),
            socket.create_connection((self.address, 8888), timeout=1) as connection,
            context.wrap_socket(connection, server_hostname=SERVER) as encrypted,
        ):
            presented = encrypted.getpeercert(binary_form=True) or b""  # gone where the replica ends meanwhile
            head = "POST /filter HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
            encrypted.sendall(f"{head}Content-Length: {len(QUESTION)}\r\n\r\n".encode() + QUESTION)
            page = b"".join(iter(lambda: encrypted.recv(65536), b""))
            return page, presented
        return b"", b""

    def serves(self) -> bool:
        return is_of_leader(self.asked()[0])

    def addresses(self) -> str:
        return self.user.get(f"endpointslice/{EXTENDER}", ".endpoints[*].addresses[*]")

    def ready(self) -> str:
        return self.user.get(f"deployment/{EXTENDER}", ".status.readyReplicas")

    def pods(self) -> list[str]:
        """Return the names of the extender's pods, also of those that are being deleted."""
        names = "jsonpath={.items[*].metadata.name}"
        return self.user.kubectl("get", "pods", "-n", NAMESPACE, "-l", SELECTOR, "-o", names).split()

    def evict(self, pod: str) -> str:
        """Evict a pod, as a drain does; return the API server's refusal."""
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
        return self.user.cluster.kubectl("create", "--raw", path, "-f", "-", given=json.dumps(eviction)).stderr


def longest_gap_s(release: Release, command: "subprocess.Popen[bytes]") -> float:
    """Return the longest time without a replica that serves, until a command has ended and one serves.

    A question takes a second at most; more is time in which a busy computer did not run this process.
    """
    longest_s, gap_s, asked_at_s, serves = 0.0, 0.0, CLOCK.monotonic_s(), True
    while command.poll() is None or not serves:
        serves, now_s = release.serves(), CLOCK.monotonic_s()
        gap_s += min(now_s - asked_at_s, LONGEST_QUESTION_S)
        longest_s, asked_at_s = max(longest_s, gap_s), now_s
        gap_s = 0.0 if serves else gap_s
        assert gap_s < 60, release.user.pods()
        time.sleep(0.05)  # noqa: TID251  for programs outside
    return longest_s


def test_helm_waits_for_both_replicas_and_upgrades_and_drains_keep_one_that_serves(
    user: Install, tmp_path: Path
) -> None:
    release = Release(user, tmp_path)
    assert release.ready() == "2", "helm has waited for both"
    until(release.serves, user.pods)
    holder = user.get(f"lease/{EXTENDER}", ".spec.holderIdentity").partition("_")[0]
    assert release.addresses() == user.get(f"pod/{holder}", ".status.podIP")

    deployment = f"deployment/{EXTENDER}"
    user.kubectl("rollout", "restart", deployment, "-n", NAMESPACE)
    options = ["rollout", "status", deployment, "-n", NAMESPACE, "--timeout=150s"]
    kubectl = [str(user.cluster.binaries / "kubectl"), f"--kubeconfig={user.cluster.kubeconfig}"]
    with subprocess.Popen([*kubectl, *options], stdout=subprocess.DEVNULL) as command:
        gap_s = longest_gap_s(release, command)
    log.info("during the rollout, no replica served for %.1f s at most", gap_s)
    assert command.returncode == 0
    assert gap_s < TERMS.duration_s, "each leader gave its lease back"

    until(lambda: release.ready() == "2", user.pods)
    until(lambda: len(release.pods()) == 2, user.pods)  # those of the former rollout are gone
    first, second = release.pods()
    assert release.evict(first) == ""
    assert "violate the pod's disruption budget" in release.evict(second)
    until(lambda: release.ready() == "2" and release.serves(), user.pods)
    assert release.evict(second) == ""
    until(lambda: release.ready() == "2" and release.serves(), user.pods)

    release.write_secret("second")
    # A change of a pod has the kubelet renew its files now, and not after a minute or two.
    user.kubectl("annotate", "pods", "-n", NAMESPACE, "-l", SELECTOR, "gpuvirt.io/test=renewed")
    renewed = ssl.PEM_cert_to_DER_cert((tmp_path / "second.crt").read_text())
    until(lambda: release.asked()[1] == renewed, user.pods, within_s=120)
    user.uninstall(release.name)
    slices = ("get", "endpointslices", "-n", NAMESPACE, "-o", "name")
    until(lambda: EXTENDER not in user.cluster.kubectl(*slices).stdout, user.pods)
