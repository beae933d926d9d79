"""`gpuvirt plan node/NAME`: what a label would change on a node, from a laptop."""

import json
from pathlib import Path

import pytest

from tests.cli.fleet import run
from tests.cli.plannedcluster import GPUS, PLANNING, cluster


async def test_the_plan_names_vms_in_the_way_and_what_then_fits(tmp_path: Path) -> None:
    arguments = ("plan", "node/node01", "--vgpu-config", "A10-4Q")
    done = await run(tmp_path, *arguments, "-o", "json", cluster=cluster(*GPUS))
    assert (done.returncode, done.stderr) == (1, "")
    first, second = json.loads(done.stdout)["gpus"]
    assert first["in_the_way"] == ["VM prod/vm-a"]
    assert first["vgpus_then"] == {"A10-8Q": 1}
    assert (second["vgpus_then"], second["fits"]) == ({"A10-4Q": 6}, {"A10-4Q": 6})
    assert second["reasons"] == []
    text = (await run(tmp_path, *arguments, cluster=cluster(*GPUS))).stdout
    assert "in the way: VM prod/vm-a\n" in text
    assert "VMs that then fit: 6 with A10-4Q" in text


async def test_whole_gpus_fit_where_nobody_is_in_the_way(tmp_path: Path) -> None:
    arguments = ("plan", "node", "node01", "--workload", "vm-passthrough")
    done = await run(tmp_path, *arguments, cluster=cluster(*GPUS))
    assert done.returncode == 1
    assert "1 with a whole GPU" in done.stdout
    free = await run(tmp_path, *arguments, cluster=cluster(GPUS[1]))
    assert free.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("node/node02", "--workload", "vm-vgpu"), "node node02 has no GpuNode; did you mean node01?"),
        (("node01", "--workload", "vm-vgpu"), "expected node/NAME, found 'node01'"),
        (("node/node01",), "expected --workload, --vgpu-config, or both"),
        (("node/node01", "--workload", "container", "--vgpu-config", "A10-4Q"), "is for --workload vm-vgpu"),
    ],
)
async def test_wrong_words_are_refused(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = await run(tmp_path, "plan", *arguments, cluster=cluster(*GPUS))
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


async def test_a_misspelt_config_is_a_problem_with_a_similar_one(tmp_path: Path) -> None:
    done = await run(tmp_path, "plan", "node/node01", "--vgpu-config", "A10-4X", cluster=cluster(*GPUS))
    assert done.returncode == 1
    assert "ConfigInvalid" in done.stdout
    assert "A10-4" in done.stdout


async def test_types_are_alternatives_on_demand(tmp_path: Path) -> None:
    arguments = ("plan", "node/node01", "--workload", "on-demand")
    done = await run(tmp_path, *arguments, "-o", "json", cluster=cluster(*GPUS))
    assert done.stderr == ""
    first, second = json.loads(done.stdout)["gpus"]
    assert (first["vgpus_then"], first["one_of"]) == ({"A10-8Q": 1}, True)
    assert first["fits"] == {"A10-8Q": 2}
    assert second["fits"] == {"A10-4Q": 5, "A10-8Q": 2}
    text = " ".join((await run(tmp_path, *arguments, cluster=cluster(*GPUS))).stdout.split())
    assert "free: 5 x A10-4Q or 2 x A10-8Q" in text
    assert "VMs that then fit: 5 with A10-4Q or 4 with A10-8Q (the first vGPU of a GPU decides its type)" in text


async def test_only_pods_keep_a_gpu_from_vgpus_and_those_of_other_plugins_are_not_known(tmp_path: Path) -> None:
    gpus = [
        {**GPUS[1], "users": ["qemu-kvm (pid 7)"]},
        {**GPUS[1], "address": "0000:17:00.0", "users": ["pod prod/a"]},
        {**GPUS[1], "address": "0000:3b:00.0", "mode": "container", "vfs": 0},
    ]
    arguments = ("plan", "node/node01", "--vgpu-config", "A10-4Q", "-o", "json")
    done = await run(tmp_path, *arguments, cluster=cluster(*gpus))
    found = {gpu["address"]: gpu for gpu in json.loads(done.stdout)["gpus"]}
    assert {address: gpu["in_the_way"] for address, gpu in found.items()} == {
        "0000:17:00.0": ["pod prod/a"],
        "0000:3b:00.0": [],
        "0000:ca:00.0": [],
    }
    assert [address for address, gpu in found.items() if "device plugin" in str(gpu["unknown"])] == ["0000:3b:00.0"]


async def test_units_are_what_a_shared_gpu_offers(tmp_path: Path) -> None:
    shared = {"address": "0000:ca:00.0", "mode": "shared", "driver": "nvidia", "units": 1000, "planning": PLANNING}
    own = {**shared, "address": "0000:65:00.0", "mode": "container", "units": None}
    arguments = ("plan", "node/node01", "--workload", "shared")
    done = await run(tmp_path, *arguments, "-o", "json", cluster=cluster(shared, own))
    assert [gpu["units"] for gpu in json.loads(done.stdout)["gpus"]] == [None, 1000]
    text = (await run(tmp_path, *arguments, cluster=cluster(shared, own))).stdout
    assert "1000 units" in text
    assert "not known here: the units of a GPU, once it is shared" in " ".join(text.split())
    assert "VMs that then fit" not in text


@pytest.mark.parametrize("arguments", [("--vgpu-config", "A10-5Q"), ("--workload", "vm-passthrough")])
async def test_a_node_whose_agent_has_not_reported_has_no_plan(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = await run(tmp_path, "plan", "node/node01", *arguments, cluster=cluster())
    assert done.returncode == 1
    assert "node01: its agent has not reported yet" in done.stdout
    assert "VMs that then fit" not in done.stdout
    assert "is changed" not in done.stdout


async def test_a_node_for_containers_has_no_agent_to_wait_for(tmp_path: Path) -> None:
    """The controller writes its GpuNode, and runs an agent there only once a label asks for VMs or shares."""
    arguments = ("plan", "node/node01", "--vgpu-config", "A10-4Q")
    done = await run(tmp_path, *arguments, cluster=cluster(spec={"mode": "container"}))
    text = " ".join(done.stdout.split())
    assert done.returncode == 1
    assert "node01: it is for containers, so no agent has read its GPUs; label it first" in text
    assert "gpuvirt vgpu apply --dry-run" in text
    assert "gpuvirt install check" in text
    assert "not reported yet" not in text


async def test_a_node_that_the_controller_does_not_list_has_no_agent(tmp_path: Path) -> None:
    done = await run(tmp_path, "plan", "node/gpu-7", "--workload", "vm-vgpu", cluster=cluster())
    assert done.returncode == 2
    text = " ".join(done.stderr.split())
    assert "node gpu-7 has no GpuNode; expected a node with an agent (kubectl get gpunodes)" in text
    assert "gpuvirt install check" in text
