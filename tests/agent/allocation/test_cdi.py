"""CDI: the specs by which Kata's runtime finds the devices that the kubelet has allocated."""

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpuvirt.agent.known import snapshot
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.published import CdiFiles
from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName
from gpuvirt.loops.cell import Cell
from gpuvirt.model.desired.settings import CdiUse, Settings
from gpuvirt.model.inventory.naming import cdi_kind, cdi_name
from gpuvirt.model.offers import cdi
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_sim.clock import SimClock
from gpuvirt_sim.hostspec import host_names
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import IDS, running_node
from tests.sim.simulated import Simulated

A10 = ResourceName("nvidia.com/GA102GL_A10")
FIRST = DeviceId("0000:65:00.0")
FILE = "gpuvirt-nvidia.com_GA102GL_A10.json"


def nodes(spec: bytes) -> Mapping[str, list[str]]:
    devices = json.loads(spec)["devices"]
    return {device["name"]: [node["path"] for node in device["containerEdits"]["deviceNodes"]] for device in devices}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def specs_of(kernel: SimKernel) -> Mapping[str, bytes]:
    return cdi.specs(snapshot.take(kernel, Settings(), IDS, SimClock()))


def test_a_spec_has_the_resource_as_its_kind_and_the_kubelets_ids_as_names(simulated: Simulated) -> None:
    specs = specs_of(simulated("2xA10"))
    assert list(specs) == [FILE]
    assert {key: value for key, value in json.loads(specs[FILE]).items() if key != "devices"} == {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/GA102GL_A10",
    }
    assert nodes(specs[FILE]) == {
        "0000:65:00.0": ["/dev/vfio/12"],
        "0000:ca:00.0": ["/dev/vfio/22"],
    }


@pytest.mark.parametrize("name", host_names())
def test_each_node_of_a_spec_is_a_device_of_its_own(simulated: Simulated, name: str) -> None:
    """Kata's runtime-rs takes each node of a spec for a group or a device; VFIO's container node is neither."""
    found = [paths for spec in specs_of(simulated(name)).values() for paths in nodes(spec).values()]
    assert all(len(paths) == 1 for paths in found)
    assert all(re.fullmatch(r"/dev/vfio/(?:[0-9]+|devices/vfio[0-9]+)", path) for (path,) in found)


def test_specs_name_only_device_nodes_where_the_host_has_iommufd(simulated: Simulated) -> None:
    (spec,) = specs_of(simulated("2xGH200")).values()
    assert all(path.startswith("/dev/vfio/devices/vfio") for paths in nodes(spec).values() for path in paths)


@pytest.mark.parametrize("name", host_names())
def test_every_offered_device_with_nodes_is_in_one_spec(simulated: Simulated, name: str) -> None:
    view = snapshot.take(simulated(name), Settings(), IDS, SimClock())
    found = {f"{json.loads(spec)['kind']}={device}" for spec in cdi.specs(view).values() for device in nodes(spec)}
    offered = {
        cdi_name(resource.name, device.id) for resource in view.resources for device in resource.devices if device.nodes
    }
    assert found == offered


@pytest.mark.parametrize(
    ("resource", "kind"),
    [
        ("nvidia.com/GRID_T4-1Q", "nvidia.com/GRID_T4-1Q"),
        ("nvidia.com/3182", "nvidia.com/GPU_3182"),
        ("3d.example/a10", "gpu.3d.example/a10"),
    ],
)
def test_both_parts_of_a_kind_begin_with_a_letter(resource: str, kind: str) -> None:
    assert cdi_kind(ResourceName(resource)) == kind


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of `running_node`'s CDI specs."""
    (tmp_path / "cdi").mkdir()
    return tmp_path / "cdi"


async def test_spec_files_exist_before_any_pod_and_after_the_agent_ends(simulated: Simulated, folder: Path) -> None:
    async with running_node(simulated("2xA10"), folder.parent) as node:
        assert set(nodes((folder / FILE).read_bytes())) == {"0000:65:00.0", "0000:ca:00.0"}
        node.kernel.unplug(PciAddress("0000:65:00.0"))
        await node.advance(2)
        assert set(nodes((folder / FILE).read_bytes())) == {"0000:ca:00.0"}
    assert (folder / FILE).exists()


async def test_an_unchanged_spec_file_is_not_written_again(simulated: Simulated, folder: Path) -> None:
    async with running_node(simulated("2xA10"), folder.parent):
        before = (folder / FILE).stat().st_mtime_ns
    async with running_node(simulated("2xA10"), folder.parent) as node:
        await node.advance(100)
        assert (folder / FILE).stat().st_mtime_ns == before


async def test_files_of_other_programs_stay_and_stale_specs_of_gpuvirt_are_removed(
    simulated: Simulated, folder: Path
) -> None:
    (folder / "nvidia.yaml").write_text("cdiVersion: 0.5.0\n")
    (folder / "gpuvirt-nvidia.com_TU104GL_TESLA_T4.json").write_text("{}")
    async with running_node(simulated("2xA10"), folder.parent) as node:
        assert files(folder) == [FILE, "nvidia.yaml"]
        (folder / FILE).unlink()
        await node.advance(31)
        assert (folder / FILE).exists()


async def test_no_spec_file_is_removed_before_the_first_scan(folder: Path) -> None:
    (folder / FILE).write_text("{}")
    clock = SimClock()
    views = Cell(NodeView(at=clock.now(), host_observed=False))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(CdiFiles(folder, clock, Intervals()).run(views, lambda _: None))
        await clock.advance(100)
        task.cancel()
    assert (folder / FILE).read_text() == "{}"


async def test_a_folder_that_cannot_be_written_is_reported_until_it_can(simulated: Simulated, tmp_path: Path) -> None:
    (tmp_path / "cdi").write_text("a file where the folder should be")
    async with running_node(simulated("2xA10"), tmp_path) as node:
        assert [note.code for note in node.view.problems] == [ReasonCode.CDI_NOT_WRITTEN]
        assert node.offered == {A10: {FIRST: True, "0000:ca:00.0": True}}
        (tmp_path / "cdi").unlink()
        await node.advance(31)
        assert node.view.problems == ()


async def test_answers_name_cdi_devices_if_the_settings_enable_them(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("2xA10"), tmp_path, Settings(cdi=CdiUse.ANSWERS)) as node:
        (given,) = node.allocate(A10, [FIRST])
        assert given.cdi_devices == ("nvidia.com/GA102GL_A10=0000:65:00.0",)
        assert given.device_nodes == ("/dev/vfio/vfio", "/dev/vfio/12")
    async with running_node(simulated("2xA10"), tmp_path, Settings()) as node:
        assert node.allocate(A10, [FIRST])[0].cdi_devices == ()
