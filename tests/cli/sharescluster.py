"""A cluster with shared GPUs, and commands that read it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.cli.commandline import GPUVIRT, PATH
from tests.extender.podapi import PodApi, serving
from tests.extender.pods import node, pod
from tests.kube.scriptedapi import Call, Reply


def cluster() -> PodApi:
    """Two nodes with three GPUs; a GPU of a worker VM has half the units of its card."""
    api = PodApi()
    api.put("nodes", node("node01", a=1000, b=1000))
    api.put("nodes", node("worker01", c=500))
    api.put("nodes", node("node02"))
    api.put("pods", pod("train", 700, on="node01", gpus=[{"a": 700}]))
    api.put("pods", pod("serve", 300, on="node01", gpus=[{"a": 300}]))
    api.put("pods", pod("pending", 900))
    api.put("pods", pod("by-hand", 100, on="worker01"))
    api.put("pods", pod("cpu-only", on="node01"))
    return api


@asynccontextmanager
async def called(
    folder: Path, api: PodApi, *arguments: str, answer: Callable[[Call], Reply] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a command against a cluster, or against what `answer` answers."""
    async with serving(answer or api.answer, folder) as served:
        process = await asyncio.create_subprocess_exec(
            *(*GPUVIRT, *arguments, "--kubeconfig", str(served.kubeconfig)),
            env={"PATH": PATH, "PYTHONUTF8": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
