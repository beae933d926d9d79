"""Kata's CDI library finds the one device node of each device that a pod has, by the kubelet's answer to Get."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import FindingCode
from gpuvirt.model.reasons.codes import Level
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import SimKubelet, running
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import change_host_in
from tests.agent.kubelet.kubeletnode import CLOCK, agent_on, options_for, until
from tests.agent.ondemand.pods import ON_DEMAND
from tests.diagnosis.doctor.katahost import kata_findings, kata_host
from tests.diagnosis.kata.witnessing import Root

pytestmark = [pytest.mark.ring("kata"), pytest.mark.xdist_group("kata")]

GOOD = (
    '{"cdiVersion": "0.5.0", "kind": "example.com/nic", "devices": [{"name": "a", "containerEdits": {"env": ["A=1"]}}]}'
)


@dataclass(frozen=True, slots=True)
class Node:
    """A node with an agent, and the folder in which Kata runs."""

    kernel: SimKernel
    kubelet: SimKubelet
    root: Root

    @property
    def offered(self) -> Sequence[str]:
        return sorted(name for name, count in self.kubelet.allocatable().items() if count)


@asynccontextmanager
async def node_of(host: str, folder: Path, settings: Settings) -> AsyncIterator[Node]:
    kernel, root = build_host(load_host(host), where=host), Root(folder)
    kernel.start_process("kubelet")
    (folder / "kubelet").mkdir()
    options = options_for(kernel, folder / "kubelet", settings)
    change_host = replace(change_host_in(folder, kernel, SimTools(kernel)), locks=folder / "locks")
    options = replace(options, cdi_folder=root.cdi, change_host=change_host if settings == ON_DEMAND else None)
    async with running(folder / "kubelet", CLOCK) as kubelet, agent_on(options):
        node = Node(kernel, kubelet, root)
        await until(lambda: bool(node.offered))
        root.make_nodes(kernel)
        yield node


@pytest.mark.parametrize(
    ("host", "settings", "kind"),
    [
        ("2xA10", Settings(), "a whole GPU"),
        ("2xGH200", Settings(), "a whole GPU with its group's siblings"),
        ("4xL40S", Settings(), "a VF with a vGPU (vendor VFIO)"),
        ("4xL40S", ON_DEMAND, "the same on demand"),
        ("2xA10-vgpu", Settings(), "a mediated device"),
    ],
)
async def test_each_device_of_a_pod_has_one_node(short_path: Path, host: str, settings: Settings, kind: str) -> None:
    async with node_of(host, short_path, settings) as node:
        for number, resource in enumerate(node.offered):
            name = f"pod-{number}"
            # The GPU of the last pod may carry that pod's vGPU a moment longer.
            await until(lambda: bool(node.kubelet.manager.resources[resource].healthy))  # noqa: B023  awaited here
            pod = await node.kubelet.run_pod(name, Container("compute", {resource: 1}))
            node.root.make_nodes(node.kernel)
            found = await node.root.witness(name)
            (held,) = pod.held
            assert found.error == ""
            assert found.devices == tuple(f"{resource}={device}" for device in held.devices), kind
            assert len(found.nodes) == 1
            assert set(found.nodes) <= set(pod.device_nodes())
            assert found.nodes[0] != "/dev/vfio/vfio"
            node.kubelet.end_pod(name)


async def test_an_init_container_with_the_devices_of_the_pod_adds_none(short_path: Path) -> None:
    async with node_of("4xL40S", short_path, ON_DEMAND) as node:
        limits = {node.offered[0]: 1}
        pod = await node.kubelet.run_pod("a", Container("nvidia", limits, init=True), Container("compute", limits))
        node.root.make_nodes(node.kernel)
        found = await node.root.witness("a")
        assert (found.error, len(found.devices)) == ("", 1)
        assert len(found.nodes) == 1
        assert set(found.nodes) <= set(pod.device_nodes())


async def test_a_pod_without_devices_and_one_that_does_not_exist(short_path: Path) -> None:
    async with node_of("2xA10", short_path, Settings()) as node:
        await node.kubelet.run_pod("bare", Container("compute", {}))
        node.root.write("/etc/cdi/broken.json", "{")
        assert (await node.root.witness("bare")).error == ""  # without a device Kata reads no spec
        assert "pod none in namespace default not found" in (await node.root.witness("none")).error


NEIGHBOURS = {
    "a valid one": {"/etc/cdi/a.json": GOOD},
    "two folders": {"/etc/cdi/a.json": GOOD, "/var/run/cdi/a.json": GOOD},
    "no spec's file name": {"/etc/cdi/notes.txt": "{"},
    "YAML": {"/etc/cdi/a.yaml": GOOD.replace("{", "{ ")},
    "broken JSON": {"/etc/cdi/a.json": "{"},
    "an empty file": {"/etc/cdi/a.json": ""},
    "no version": {"/etc/cdi/a.json": GOOD.replace("cdiVersion", "version")},
    "a newer version": {"/etc/cdi/a.json": GOOD.replace("0.5.0", "0.7.0")},
    "a version that there is not": {"/etc/cdi/a.json": GOOD.replace("0.5.0", "0.5.7")},
    "a kind without class": {"/etc/cdi/a.json": GOOD.replace("example.com/nic", "nic")},
    "a class of one letter": {"/etc/cdi/a.json": GOOD.replace("example.com/nic", "example.com/n")},
    "no devices": {"/etc/cdi/a.json": '{"cdiVersion": "0.5.0", "kind": "example.com/nic", "devices": []}'},
    "a device without a name": {"/etc/cdi/a.json": GOOD.replace('"name": "a", ', "")},
    "an invalid name": {"/etc/cdi/a.json": GOOD.replace('"name": "a"', '"name": "a b"')},
    "a device without edits": {"/etc/cdi/a.json": GOOD.replace('{"env": ["A=1"]}', "{}")},
    "an unknown field": {"/etc/cdi/a.json": GOOD.replace('"kind"', '"other": 1, "kind"')},
    "a device twice in a folder": {"/etc/cdi/a.json": GOOD, "/etc/cdi/b.json": GOOD},
    "a device twice in a spec": {
        "/etc/cdi/a.json": '{"cdiVersion": "0.5.0", "kind": "example.com/nic", "devices": ['
        '{"name": "a", "containerEdits": {"env": ["A=1"]}}, {"name": "a", "containerEdits": {"env": ["A=2"]}}]}'
    },
    "a kind that begins with a digit": {"/etc/cdi/a.json": GOOD.replace("example.com/nic", "0example.com/nic")},
    "fields of a later version": {"/etc/cdi/a.json": GOOD.replace("0.5.0", "0.4.0").replace('"a"', '"0"')},
    "a dot in the class": {"/etc/cdi/a.json": GOOD.replace("example.com/nic", "example.com/n.c")},
    "annotations": {"/etc/cdi/a.json": GOOD.replace('"kind"', '"annotations": {"a": "b"}, "kind"')},
    "a version with its letter": {"/etc/cdi/a.json": GOOD.replace("0.5.0", "v0.5.0")},
    "nulls": {"/etc/cdi/a.json": GOOD.replace('"kind"', '"annotations": null, "containerEdits": null, "kind"')},
    "a node of an unknown type": {
        "/etc/cdi/a.json": GOOD.replace('"env": ["A=1"]', '"deviceNodes": [{"path": "/dev/x", "type": "x"}]')
    },
    "a node that does not exist": {
        "/etc/cdi/a.json": GOOD.replace('"env": ["A=1"]', '"deviceNodes": [{"path": "/dev/x"}]')
    },
    "a hook at no time": {
        "/etc/cdi/a.json": GOOD.replace('"env": ["A=1"]', '"hooks": [{"hookName": "later", "path": "/x"}]')
    },
    "a mount to nowhere": {"/etc/cdi/a.json": GOOD.replace('"env": ["A=1"]', '"mounts": [{"hostPath": "/x"}]')},
    "an invalid variable": {"/etc/cdi/a.json": GOOD.replace("A=1", "A")},
}
"""Files of other programs, which decide whether any pod with devices starts."""
STRICTER = {"no devices"}
"""The cases that doctor reports for the sake of later versions of the library."""


@pytest.mark.parametrize("name", list(NEIGHBOURS))
async def test_doctor_finds_the_specs_by_which_kata_starts_no_pod(short_path: Path, name: str) -> None:
    files = NEIGHBOURS[name]
    async with node_of("2xA10", short_path, Settings()) as node:
        await node.kubelet.run_pod("a", Container("compute", {node.offered[0]: 1}))
        for path, text in files.items():
            node.root.write(path, text)
        error = (await node.root.witness("a")).error
    found = [finding for finding in kata_findings(kata_host(files)) if finding.code is FindingCode.KATA_CDI_SPEC]
    found = [finding for finding in found if finding.level is not Level.OK]
    assert bool(found) == (bool(error) or name in STRICTER), (error, found)
