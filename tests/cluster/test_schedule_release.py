"""VgpuSchedules by the chart: the controller in its image, with its own account, and a vCenter outside the node."""

from pathlib import Path

import pytest
import yaml
from lab.cluster.places import REAL

from gpuvirt.plain import Plain
from tests.cluster.chartlab import NAMESPACE, Install
from tests.cluster.clusterlab import LabNode
from tests.cluster.documentsday import DAY, Day
from tests.cluster.rights import asked_in, rights_in, unused
from tests.cluster.workernodes import WorkerNodes
from tests.hypervisors.simulated import center
from tests.web.certificates import Authority

pytestmark = [
    pytest.mark.ring("cluster"),
    pytest.mark.ring("helm"),
    pytest.mark.ring("vsphere"),
    pytest.mark.xdist_group("cluster"),
]
FORBIDDEN = 403
CONTROLLER = "gpuvirt-controller"
CLUSTER_API = [("machinehealthchecks", "list"), ("machines", "get")]
VMS = [("gpunodes", "get"), ("poddisruptionbudgets", "list")]
NOT_HERE = [("nodes", "get"), ("pods", "delete"), *CLUSTER_API, *CLUSTER_API, *VMS]
"""Rights for a worker that no phase selects any more, for `onTimeout: Force`, for Machines of two kinds, and for
`vms: Stop`."""


def test_a_release_runs_schedules_with_the_rights_that_the_chart_gives(
    user: Install, node: LabNode, tmp_path: Path
) -> None:
    log = user.cluster.audit_log
    begin = log.stat().st_size if log.exists() else 0
    with (
        center(tmp_path, Authority(tmp_path), address=REAL.address) as vcenter,
        WorkerNodes(node, vcenter.vsphere).running() as workers,
    ):
        day = Day(node, workers, vcenter)
        release = user.installed("schedule.enabled=true")
        manifest = user.must("get", "manifest", release, "-n", NAMESPACE)
        documents: list[Plain] = list(yaml.safe_load_all(manifest))
        day.train("small", "v100-4q-4GB", 3)
        day.until_pods("small", ["Running"] * 3)
        day.create()
        day.until_reached("day")
        day.gpuvirt("schedule", "switch", "gpus", "night", "--until", "2098-01-01T00:00", "--namespace", NAMESPACE)
        day.until_reached("night")
        assert vcenter.vsphere.state.power == dict.fromkeys(DAY, "suspended") | {"worker4": "poweredOn"}
        assert workers.cordoned() == DAY
        events = user.kubectl("get", "events.events.k8s.io", "-n", NAMESPACE, "-o", "jsonpath={.items[*].reason}")
        assert {"Switching", "PhaseReached"} <= set(events.split())
        assert vcenter.credentials.password not in user.pods()
        with log.open() as file:
            file.seek(begin)
            asked = asked_in(file)
        user.kubectl("delete", "vgpuschedule", "gpus", "-n", NAMESPACE)
        user.clear()
    by_controller = [request for request in asked if request.account == CONTROLLER]
    # A controller may ask for its lease a moment before its roles exist.
    assert [request for request in by_controller if request.code == FORBIDDEN and request.resource != "leases"] == []
    access = rights_in(document for document in documents if is_about_schedules(document))
    assert sorted((right.resource, right.verb) for right in unused(access, by_controller)) == sorted(NOT_HERE)


def is_about_schedules(document: Plain) -> bool:
    metadata = document["metadata"] if isinstance(document, dict) else None
    return isinstance(metadata, dict) and str(metadata["name"]).endswith("-schedules")
