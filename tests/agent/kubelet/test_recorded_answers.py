"""Commands read what other device plugins answered from the kubelet's checkpoint, and the nodes in it from the host."""

import json
from base64 import b64encode
from pathlib import Path

import pytest

from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.cli.podaccount import AllocationReader
from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.scan import scan, with_device_ids
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.paths import HostRoots, KubeletPaths
from tests.sim.simulated import Simulated

FIRST = PciAddress("0000:3b:00.0")


@pytest.mark.parametrize(
    ("node", "gpus", "unmapped"), [("/dev/nvidia0", {FIRST}, 0), ("/dev/kvm", set(), 1), ("/dev/none", set(), 1)]
)
def test_a_command_maps_a_pod_by_the_node_that_its_plugin_answered(
    simulated: Simulated, tmp_path: Path, node: str, gpus: set[PciAddress], unmapped: int
) -> None:
    """The simulated kernel lists no device of `/dev/kvm`'s number, so that it may be any."""
    kernel, paths = simulated("4xT4"), KubeletPaths(tmp_path / "k")
    answer = pb.ContainerAllocateResponse(devices=[pb.DeviceSpec(host_path=node)]).SerializeToString()
    entry = {
        "PodUID": "u1",
        "ContainerName": "c",
        "ResourceName": "tencent.com/vcuda-core",
        "DeviceIDs": {"-1": ["7"]},
        "AllocResp": b64encode(answer).decode(),
    }
    paths.device_plugins.mkdir(parents=True)
    content = {"Data": {"PodDeviceEntries": [entry], "RegisteredDevices": {}}, "Checksum": 1}
    paths.checkpoint.write_text(json.dumps(content))
    account = AllocationReader(kernel, HostRoots.under(tmp_path), paths, ledgers=(), assume_unallocated=True)
    inventory = build_inventory(with_device_ids(kernel, scan(kernel)))
    found = account.account(inventory).allocations
    assert (set(found.functions), len(found.unmapped)) == (gpus, unmapped)
