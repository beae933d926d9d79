"""Claims (DRA) with a real scheduler, kubelet and API server: each gets a whole GPU, alone, and gives it back."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

import msgspec
import pytest
import yaml
from lab.cluster.settings import NODE

from gpuvirt.diagnosis.vms.podclaims import ClaimSeen, ClaimState
from gpuvirt.model.dra.claimfiles import IN_CONTAINER
from gpuvirt.plain import Plain
from tests.cli.commandline import ran
from tests.cluster.clusterlab import LabNode
from tests.cluster.labnamespace import BOX

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

ROOT = Path(__file__).parents[2]
TWO_T4 = """
about: two T4 on their native driver
slots:
  - {at: "0000:3b:00.0", board: T4, group: 31}
  - {at: "0000:af:00.0", board: T4, group: 62}
"""
SHOW = f"ls /dev/vfio; cat {IN_CONTAINER}/resourceclaims/*/gpu/*; sleep 10000"


@contextmanager
def claims(node: LabNode, folder: Path) -> Iterator[Path]:
    """Run an agent whose GPUs claims get, in a cluster with the DeviceClass."""
    (folder / "2xT4.yaml").write_text(TWO_T4)
    objects: list[Mapping[str, Plain]] = list(yaml.safe_load_all((ROOT / "deploy/claims.yaml").read_text()))
    (device_class,) = (found for found in objects if found["kind"] == "DeviceClass")
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    with node.simulated_host(str(folder / "2xT4.yaml")) as host, node.cdi_folder(), node.nodes_kept():
        node.apply(device_class)
        try:
            with node.agent("mode: claims", asks):
                node.until(lambda: len(published(node)) == 2, lambda: f"{published(node)} {node.log}")
                yield host
        finally:
            node.kubectl("delete", "deviceclass,resourceslice", "--all")


def published(node: LabNode) -> list[str]:
    """Return the devices at the API server."""
    slices = json.loads(node.kubectl("get", "resourceslices", "-o", "json"))["items"]
    return [device["name"] for found in slices for device in found["spec"].get("devices") or []]


def start(node: LabNode, name: str) -> None:
    """Create a claim and its pod."""
    exactly = {"deviceClassName": "passthrough.gpuvirt.io"}
    node.apply(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": node.namespace},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
        }
    )
    container = {
        "name": "compute",
        "image": BOX,
        "imagePullPolicy": "Never",
        "args": [SHOW],
        "resources": {"claims": [{"name": "gpus", "request": "gpu"}]},
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "resourceClaims": [{"name": "gpus", "resourceClaimName": name}],
        "containers": [container],
    }
    metadata = {"name": name, "namespace": node.namespace}
    node.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


def until_runs(node: LabNode, name: str) -> None:
    def seen() -> str:
        events = node.kubectl("get", "events", "--field-selector", f"involvedObject.name={name}")
        return f"{node.status(name)} {events} {node.log}"

    node.until(lambda: node.status(name).phase == "Running" and len(node.output(name)) > 3, seen)


def gpu_of(node: LabNode, name: str) -> tuple[str, str]:
    """Return the GPU that a pod has by its metadata, and the group of the node that it got."""
    output = "\n".join(node.output(name))
    groups, _, text = output.partition("{")
    shown, _ = json.JSONDecoder().raw_decode("{" + text)
    (device,) = shown["requests"][0]["devices"]
    (group,) = set(groups.split()) - {"vfio", "devices"}
    return device["attributes"]["resource.kubernetes.io/pciBusID"]["string"], group


def driver_of(host: Path, gpu: str) -> str:
    return (host / f"sys/bus/pci/devices/{gpu}/driver").readlink().name


def asked(node: LabNode, *words: str) -> CompletedProcess[str]:
    """Run a command in the namespace of the pods."""
    return ran(*words, "-n", node.namespace, "--kubeconfig", str(node.cluster.kubeconfig))


def shown(node: LabNode) -> dict[str, ClaimSeen]:
    """Return the claims that `gpuvirt claims` shows, by name."""
    printed = asked(node, "claims", "-o", "json").stdout
    return {claim.name: claim for claim in msgspec.json.decode(printed, type=list[ClaimSeen])}


GROUPS = {"0000:3b:00.0": "31", "0000:af:00.0": "62"}


def test_a_claim_gets_a_gpu_alone_and_a_restart_of_the_kubelet_changes_nothing(node: LabNode, tmp_path: Path) -> None:
    with claims(node, tmp_path) as host:
        assert {driver_of(host, gpu) for gpu in GROUPS} == {"nvidia"}
        start(node, "first")
        until_runs(node, "first")
        mine, group = gpu_of(node, "first")
        assert GROUPS[mine] == group
        (other,) = GROUPS.keys() - {mine}
        assert (driver_of(host, mine), driver_of(host, other)) == ("vfio-pci", "nvidia")
        start(node, "second")
        until_runs(node, "second")
        assert gpu_of(node, "second") == (other, GROUPS[other])
        start(node, "third")
        node.until(lambda: shown(node)["third"].reason != "", lambda: f"{shown(node)} {node.log}")
        found = shown(node)
        assert {name: claim.state for name, claim in found.items()} == {
            "first": ClaimState.IN_USE,
            "second": ClaimState.IN_USE,
            "third": ClaimState.PENDING,
        }
        assert [(device.gpu, claim.pods) for claim in found.values() for device in claim.devices] == [
            (mine, ("first",)),
            (other, ("second",)),
        ]
        assert "cannot allocate all claims" in found["third"].reason
        assert "cannot allocate all claims" in asked(node, "why", "claim/third").stdout
        assert asked(node, "why", "pod/first").returncode == 0
        node.cluster.stop("kubelet")
        node.cluster.start_kubelet()  # which deletes the slices
        node.until(lambda: len(published(node)) == 2, lambda: f"{published(node)} {node.log}")
        assert [node.status(name).phase for name in ("first", "second", "third")] == ["Running", "Running", "Pending"]
        assert [status.restartCount for status in node.status("first").containerStatuses] == [0]
        node.delete("first")
        node.kubectl("delete", "resourceclaim", "first")
        until_runs(node, "third")
        assert gpu_of(node, "third") == (mine, group)
        for name in ("second", "third"):
            node.delete(name)
            node.kubectl("delete", "resourceclaim", name)
        specs = node.cluster.folder / "cdi"
        node.until(lambda: not list(specs.glob("gpuvirt.io-claim-*")), lambda: f"{list(specs.iterdir())} {node.log}")
