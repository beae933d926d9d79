"""The pods of the node that the agent lists while the kubelet's record of allocations is in doubt."""

import msgspec
import pytest

from gpuvirt.agent.cluster.clusterside import requests_of
from gpuvirt.kube.kinds.core import WholePod
from gpuvirt.model.allocation.recordhistory import PodRequests

META = {"name": "a", "namespace": "ns", "uid": "u1"}


def requests(spec: object = None, status: object = None, metadata: object = META) -> PodRequests:
    content = msgspec.json.encode({"metadata": metadata, "spec": spec or {}, "status": status or {"phase": "Running"}})
    return requests_of(msgspec.json.decode(content, type=WholePod))


def container(name: str, **quantities: object) -> object:
    return {"name": name, "resources": quantities}


def test_extended_resources_of_all_containers() -> None:
    found = requests(
        {
            "containers": [container("main", limits={"nvidia.com/gpu": "1", "cpu": "2", "hugepages-2Mi": "1Gi"})],
            "initContainers": [container("init", requests={"amd.com/gpu": 2})],
        }
    )
    assert found.name == "ns/a"
    assert found.resources == {("main", "nvidia.com/gpu"), ("init", "amd.com/gpu")}
    assert (found.has_claims, found.has_ended) == (False, False)


@pytest.mark.parametrize("limits", [{"nvidia.com/gpu": "0"}, {"kubernetes.io/batch": "1"}, {"memory": "1Gi"}, {}])
def test_other_quantities_are_no_devices(limits: object) -> None:
    assert not requests({"containers": [container("main", limits=limits)]}).resources


def test_claims_and_ended_pods() -> None:
    assert requests({"resourceClaims": [{"name": "gpu"}]}).has_claims
    assert requests(status={"extendedResourceClaimStatus": {"resourceClaimName": "c"}}).has_claims
    assert [requests(status={"phase": phase}).has_ended for phase in ("Failed", "Succeeded", "Pending", "")] == [
        *(True, True, False, False)
    ]


def test_a_static_pod_has_the_uid_of_its_folder() -> None:
    static = {**META, "annotations": {"kubernetes.io/config.mirror": "0f3a", "kubernetes.io/config.source": "file"}}
    assert requests(metadata=static).uid == "0f3a"
    assert requests().uid == "u1"
