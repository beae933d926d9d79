"""The files that a cluster's programs read: certificates, tokens, kubeconfigs, kubelet, containerd, network."""

import json
import shutil
import subprocess
from ipaddress import ip_address
from pathlib import Path

from lab.cluster.places import Place

NODE = "node01"
"""The only node of each cluster."""
HOST = "host"
"""The folder below the lab's folder where tests mount the simulated host that is the node's hardware."""
CDI = "cdi"
"""The folder below the lab's folder for CDI specs. containerd's watch of a folder ends with the mount that it is on, so
it watches none on a simulated host."""
KUBELET_PORT = 20250

AUDITED = "gpu-operator"
"""The namespace whose service accounts the API server audits."""
AUDIT_LOG = "log/audit.jsonl"

EXEMPT = "kata-gpu"
"""The RuntimeClass whose pods no policy of pod security refuses."""

CLIENT_CA = "certs/clients"
"""The authority of users' certificates: the certificate `.crt`, and its `.key`."""

ADMIN_TOKEN = "admin-token"  # noqa: S105  of a cluster that exists for one run
TOKENS = f"""{ADMIN_TOKEN},admin,1,"system:masters"
node-token,system:node:node01,2,"system:nodes"
"""


def write_control_plane(folder: Path, place: Place) -> None:
    """Write what the control plane and its clients read below `folder`."""
    for name in ("etcd", "certs", "log"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    _write_keys(folder)
    (folder / "tokens.csv").write_text(TOKENS)
    (folder / "kubeconfig").write_text(_kubeconfig(folder, place, "admin", ADMIN_TOKEN))
    (folder / "audit.yaml").write_text(_audit())
    (folder / "admission.yaml").write_text(_admission())


def write_node(folder: Path, place: Place) -> None:
    """Write what the kubelet, containerd and its network plugins read below `folder`."""
    for name in ("containerd", "cni/bin", "cni/conf"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "kubeconfig.node").write_text(_kubeconfig(folder, place, "node", "node-token"))
    (folder / "kubelet.yaml").write_text(_kubelet(folder))
    (folder / "containerd.toml").write_text(_containerd(folder))
    (folder / "cni/conf/10-lab.conflist").write_text(json.dumps(_network(place)))
    for plugin in ("bridge", "host-local", "loopback"):
        shutil.copy(f"/usr/lib/cni/{plugin}", folder / "cni/bin" / plugin)


def _write_keys(folder: Path) -> None:
    key, public = folder / "sa.key", folder / "sa.pub"
    if not key.exists():
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        made = ["openssl", "rsa", "-in", str(key), "-pubout", "-out", str(public)]
        subprocess.run(made, check=True, capture_output=True)
    authority = folder / CLIENT_CA
    if not authority.with_suffix(".crt").exists():
        files = ("-keyout", str(authority.with_suffix(".key")), "-out", str(authority.with_suffix(".crt")))
        made = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            *files,
            "-subj",
            "/CN=clients",
            "-days",
            "3650",
        ]
        subprocess.run(made, check=True, capture_output=True)


def _kubeconfig(folder: Path, place: Place, user: str, token: str) -> str:
    cluster = f'{{server: "https://{place.address}:{place.port}", certificate-authority: {folder}/certs/apiserver.crt}}'
    return f"""apiVersion: v1
kind: Config
clusters: [{{name: lab, cluster: {cluster}}}]
users: [{{name: {user}, user: {{token: {token}}}}}]
contexts: [{{name: lab, context: {{cluster: lab, user: {user}}}}}]
current-context: lab
"""


def _audit() -> str:
    """Return the audit policy: the requests of some service accounts, which tests compare with the accounts' rights."""
    return f"""apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - {{level: Metadata, userGroups: ["system:serviceaccounts:{AUDITED}"]}}
  - {{level: None}}
"""


def _admission() -> str:
    """Return the configuration of pod security: what namespaces' labels say, except for one RuntimeClass."""
    return f"""apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
  - name: PodSecurity
    configuration:
      apiVersion: pod-security.admission.config.k8s.io/v1
      kind: PodSecurityConfiguration
      exemptions: {{runtimeClasses: [{EXEMPT}]}}
"""


def _kubelet(folder: Path) -> str:
    """Return the kubelet's configuration: for cgroup v1 without systemd, a small disk, and fast status updates.

    With makeIPTablesUtilChains, the kubelet would leave chains behind.
    """
    return f"""apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {{anonymous: {{enabled: true}}, webhook: {{enabled: false}}}}
authorization: {{mode: AlwaysAllow}}
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failSwapOn: false
failCgroupV1: false
containerRuntimeEndpoint: unix://{folder}/containerd.sock
evictionHard: {{memory.available: 10Mi, nodefs.available: 1%, imagefs.available: 1%}}
imageGCHighThresholdPercent: 100
port: {KUBELET_PORT}
readOnlyPort: 0
healthzPort: 20248
topologyManagerPolicy: best-effort
nodeStatusUpdateFrequency: 1s
makeIPTablesUtilChains: false
"""


def _containerd(folder: Path) -> str:
    """Return containerd's configuration; without restrict_oom_score_adj, runc fails without CAP_SYS_RESOURCE.

    The runtime `nvidia` stands in for that of NVIDIA's container toolkit.
    """
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""version = 2
root = "{folder}/containerd/root"
state = "{folder}/containerd/state"
[grpc]
  address = "{folder}/containerd.sock"
[{cri}]
  sandbox_image = "docker.io/local/pause:1"
  restrict_oom_score_adj = true
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/run/cdi", "{folder}/{CDI}"]
[{cri}.cni]
  bin_dir = "{folder}/cni/bin"
  conf_dir = "{folder}/cni/conf"
[{cri}.containerd]
  default_runtime_name = "runc"
[{cri}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[{cri}.containerd.runtimes.nvidia]
  runtime_type = "io.containerd.runc.v2"
"""


def _network(place: Place) -> dict[str, object]:
    ranges = [[{"subnet": place.network, "rangeStart": str(ip_address(place.address) + 9)}]]
    ipam = {"type": "host-local", "ranges": ranges, "routes": [{"dst": place.services}]}
    bridge = {"type": "bridge", "bridge": place.bridge, "isGateway": True, "ipMasq": False, "ipam": ipam}
    return {"cniVersion": "0.4.0", "name": "lab", "plugins": [bridge]}
