"""A simulated API server in a process of its own, with the nodes and pods of a large cluster."""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tests.extender.podapi import PodApi, serving
from tests.extender.pods import node, pod

GPUS = 8
READY_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Scale:
    """The nodes and pods of a cluster."""

    nodes: int
    pods: int
    mixed: bool = False
    """Whether each node has GPUs of other sizes, so that no answer about one holds for another."""

    def names(self) -> Sequence[str]:
        """Return the names of the nodes."""
        return [f"gpu-node-{number:05}.example.com" for number in range(self.nodes)]


def gpu(name: str, number: int) -> str:
    """Return the id of a GPU, of the usual length."""
    return f"{name[9:14]}{number:03}-0000-4000-8000-0123456789ab"


def fill(api: PodApi, scale: Scale) -> None:
    """Create the nodes, and pods on them: on half of the GPUs, as evenly as their number allows."""
    names = scale.names()
    for name in names:
        sizes = [700 + (int(name[9:14]) * (number + 1)) % 300 if scale.mixed else 1000 for number in range(GPUS)]
        api.put("nodes", node(name, **{gpu(name, number): size for number, size in enumerate(sizes)}))
    places = [(name, number) for number in range(GPUS) for name in names if (number + int(name[9:14])) % 2]
    for number in range(scale.pods):
        name, index = places[number % len(places)]
        given = gpu(name, index)
        units = max(1000 // -(-scale.pods // len(places)), 1)
        api.put("pods", pod(f"pod-{number:05}", units, on=name, gpus=[{given: units}], labels=labels(number)))


def labels(number: int) -> Mapping[str, str]:
    """Return labels of a pod as charts set them."""
    return {
        "app.kubernetes.io/name": "training",
        "app.kubernetes.io/instance": f"team-{number % 50}",
        "app.kubernetes.io/managed-by": "Helm",
        "pod-template-hash": f"6d4cf56db{number % 500}",
    }


def serve(scale: Scale, folder: Path) -> None:
    """Serve a simulated API server until the process is ended."""

    async def run() -> None:
        api = PodApi()
        fill(api, scale)
        async with serving(api.answer, folder):
            await asyncio.get_running_loop().create_future()

    asyncio.run(run())


@contextmanager
def api_server(scale: Scale, folder: Path) -> Iterator[Path]:
    """Run a simulated API server, and provide its kubeconfig."""
    process = multiprocessing.Process(target=serve, args=(scale, folder), daemon=True)
    process.start()
    try:
        wait((folder / "kubeconfig").exists)
        yield folder / "kubeconfig"
    finally:
        process.terminate()
        process.join()


def wait(met: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + READY_WITHIN_S
    while not met():
        if time.monotonic() > deadline:
            raise SystemExit(f"not ready after {READY_WITHIN_S:g} s")
        time.sleep(0.05)


@contextmanager
def api_server_of(
    scale: Scale, asked: Sequence[str], folder: Path
) -> Iterator[tuple[Path, Callable[[], Mapping[str, int]]]]:
    """Run a simulated API server with pods to bind; provide its kubeconfig, and the units that each GPU has given."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_serve_race, args=(scale, asked, folder, theirs), daemon=True)
    process.start()

    def taken() -> Mapping[str, int]:
        ours.send("taken")
        found: Mapping[str, int] = ours.recv()
        return found

    try:
        wait((folder / "kubeconfig").exists)
        yield folder / "kubeconfig", taken
    finally:
        process.terminate()
        process.join()


def _serve_race(
    scale: Scale,
    asked: Sequence[str],
    folder: Path,
    pipe: "multiprocessing.connection.Connection[Mapping[str, int], str]",
) -> None:
    async def run() -> None:
        api = PodApi()
        fill(api, scale)
        for name in asked:
            api.put("pods", pod(name, 300))

        def report() -> None:
            pipe.recv()
            pipe.send(units_given(api))

        asyncio.get_running_loop().add_reader(pipe.fileno(), report)
        async with serving(api.answer, folder):
            await asyncio.get_running_loop().create_future()

    asyncio.run(run())


def units_given(api: PodApi) -> Mapping[str, int]:
    """Return the units of each GPU that the pods of the API server have by their annotations."""
    given: dict[str, int] = {}
    for key in api.pods:
        if not api.node_of(key):
            continue
        content = msgspec.json.decode(api.annotations(key)["gpuvirt.io/shares"], type=dict[str, object])
        for shares in msgspec.convert(content["containers"], dict[str, dict[str, int]]).values():
            for name, units in shares.items():
                given[name] = given.get(name, 0) + units
    return given
