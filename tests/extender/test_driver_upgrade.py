"""A node whose driver is being replaced gets no more pods with units, by the labels that NVIDIA's operator sets."""

import asyncio
from pathlib import Path

import msgspec

from gpuvirt.clock import RealClock
from tests.extender.podapi import PodApi
from tests.extender.pods import Object, node, pod
from tests.extender.processes import is_ready, post, running, until

UPGRADE, CLIENT = "nvidia.com/gpu-driver-upgrade-state", "nvidia.com/gpu.deploy.client"
STATES = ("upgrade-required", "cordon-required", "pod-restart-required", "validation-required", "upgrade-failed")


def labelled(**labels: str) -> Object:
    names = {"upgrade": UPGRADE, "client": CLIENT}
    content = node("n", a=1000)
    metadata = msgspec.convert(content["metadata"], dict[str, object])
    return {**content, "metadata": {**metadata, "labels": {names[key]: value for key, value in labels.items()}}}


async def test_no_pod_is_placed_until_the_upgrade_has_ended(tmp_path: Path) -> None:
    api = PodApi()
    api.put("nodes", labelled(upgrade="upgrade-done", client="true"))
    api.put("pods", pod("has", 300, on="n", gpus=[{"a": 300}]))
    async with running(api, tmp_path) as processes:
        process = await processes.start(elects=False)
        await until(lambda: is_ready(process))

        async def refusal() -> str:
            answer = await post(process, "filter", Pod=pod("new", 300), NodeNames=["n"])
            return str(answer["FailedAndUnresolvableNodes"]) if answer["NodeNames"] == [] else ""

        async def until_refused_by(expected: str) -> None:
            async with asyncio.timeout(30):
                while (found := await refusal()) != expected and not (expected and expected in found):
                    await RealClock().sleep(0.01)

        await until_refused_by("")
        for state in STATES:
            api.put("nodes", labelled(upgrade=state, client="true"))
            await until_refused_by(f"DriverUpgrade: the driver of the node is being replaced ({UPGRADE}={state})")
        api.put("nodes", labelled(client="paused-for-driver-upgrade"))
        await until_refused_by(f"{CLIENT}=paused-for-driver-upgrade")
        api.put("nodes", labelled(client="true"))
        await until_refused_by("")
