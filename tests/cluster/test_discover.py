"""The discoverer on a real API server and by its manifest: labels are set, changed, restored and removed."""

import platform
from pathlib import Path

import pytest
from lab.cluster.cluster import Cluster
from lab.cluster.images import PREFIX
from lab.cluster.ourimage import NAME

from gpuvirt.paths import HostPath
from tests.cluster.apilab import DISCOVERER, NAMESPACE, ROOT, ApiLab, discoverers_api
from tests.cluster.clusterlab import LabNode
from tests.cluster.labnamespace import PATIENCE_S

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

OS_RELEASE = HostPath("/etc/os-release")
EVERY_S = 0.2
NONE = ("", "", "")


@pytest.fixture
def api(lab: Cluster, tmp_path: Path) -> ApiLab:
    return discoverers_api(lab, tmp_path)


def test_the_discoverer_pod_runs_with_the_rights_of_its_manifest(api: ApiLab, node: LabNode, image: None) -> None:  # noqa: ARG001
    text = (ROOT / "deploy/discover.yaml").read_text().replace("image: gpuvirt:0.1.0", f"image: {PREFIX}/{NAME}")
    manifest = text.replace("imagePullPolicy: IfNotPresent", "imagePullPolicy: Never")
    host = platform.freedesktop_os_release()
    daemon_set = ("--namespace", NAMESPACE, "daemonset", DISCOVERER)
    try:
        api.kubectl("apply", "-f", "-", given=manifest)
        rolled_out = ("rollout", "status", *daemon_set, f"--timeout={PATIENCE_S:g}s")
        assert node.cluster.kubectl(*rolled_out).returncode == 0, logs()
        present = "" if not any(map(is_nvidias, Path("/sys/bus/pci/devices").iterdir())) else "true"
        assert api.discovered() == (present, host["ID"], host.get("VERSION_ID", "")), logs()
    finally:
        api.kubectl("delete", *daemon_set, "--cascade=foreground", "--wait=true")


def is_nvidias(function: Path) -> bool:
    codes = [int((function / name).read_text(), 16) for name in ("vendor", "class")]
    return codes[0] == 0x10DE and codes[1] >> 8 in {0x300, 0x302}


def logs() -> str:
    """The log of its pod."""
    files = Path("/var/log/pods").glob(f"{NAMESPACE}_{DISCOVERER}-*/discover/*.log")
    return "\n".join(file.read_text()[-3000:] for file in files)
