"""Measures device plugins side by side: their start, their Allocate call by call in turn, and each one idle."""

import asyncio
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
from msgspec.structs import replace

from bench.host import write_host
from bench.process import FLOOR, Plugin, cpu_s, private_kib, pss_kib, started
from bench.results import Results
from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.clock import RealClock
from gpuvirt_sim.kubelet.kubelet import SimKubelet, running

REGISTERED_WITHIN_S = 60.0
GPUS = 8
"""GPUs of the host on which Allocate and the idle plugins are measured."""
USED_CALLS = 500
SETTLED_AFTER_S = 6.0
"""The agent collects garbage once, 5 s after its start."""

T = TypeVar("T")
Call = Callable[[pb.AllocateRequest], pb.AllocateResponse]


@dataclass(frozen=True, slots=True)
class Effort:
    """The extent of the measurement."""

    rounds: int
    calls: int
    idle_s: float
    sizes: Sequence[int]
    """GPUs of the hosts on which starts are measured."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A running plugin that has registered all devices of its host."""

    pid: int
    socket: Path
    devices: Sequence[str]
    start_s: float
    start_cpu_s: float


async def measure(plugins: Sequence[Plugin], effort: Effort, work: Path, results: Results) -> None:
    """Measure plugins, the first of which is gpuvirt's, and the floor."""
    floor = Plugin("floor", FLOOR)
    for plugin in (*plugins, floor):
        for gpus in {*effort.sizes, GPUS}:
            write_host(gpus, _host(plugin, gpus, work))
    for gpus in effort.sizes:
        await _measure_start((*plugins, floor), gpus, effort.rounds, work, results)
    answers = work / "answers"
    answers.mkdir()
    floor = replace(floor, command=(*FLOOR, "--answers", str(answers)))
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(_serving(plugins[0], GPUS, work))
        await _in_thread(lambda: _write_answers(ours, answers))
        both = {plugins[0].name: ours}
        for plugin in (*plugins[1:], floor):
            both[plugin.name] = await stack.enter_async_context(_serving(plugin, GPUS, work))
        await _in_thread(lambda: _measure_allocate(both, effort.calls, results))
    for plugin in (*plugins, floor):
        await _measure_idle(plugin, effort.idle_s, work, results)


def _host(plugin: Plugin, gpus: int, work: Path) -> Path:
    """Return the folder of a plugin's host. Each plugin has its own host, because an agent allows no second one."""
    return work / f"host-{gpus}-{plugin.name}"


@asynccontextmanager
async def _serving(plugin: Plugin, gpus: int, work: Path) -> AsyncIterator[Serving]:
    """Run a plugin beside a kubelet of its own, for as long as the context lasts."""
    folder = Path(tempfile.mkdtemp(prefix="k", dir=work))
    async with running(folder, RealClock()) as kubelet:
        began = time.monotonic()
        with started(plugin, _host(plugin, gpus, work), folder, work / "bytecode") as process:
            resource = await _registered(kubelet, gpus, process)
            start_s, start_cpu_s = time.monotonic() - began, cpu_s(process.pid)
            found = await _in_thread(lambda: list(folder.glob("device-plugins/*.sock")))
            socket = next(path for path in found if path.name != "kubelet.sock")
            devices = sorted(kubelet.manager.resources[resource].healthy)
            yield Serving(process.pid, socket, devices, start_s, start_cpu_s)


async def _registered(kubelet: SimKubelet, devices: int, process: subprocess.Popen[bytes]) -> str:
    """Wait until all devices are allocatable; return their resource."""
    deadline = time.monotonic() + REGISTERED_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        if sum(kubelet.allocatable().values()) >= devices:
            return max(kubelet.allocatable(), key=lambda name: kubelet.allocatable()[name])
        await asyncio.sleep(0.002)
    state = (
        f"the plugin still runs after {REGISTERED_WITHIN_S:g} s"
        if process.poll() is None
        else f"the plugin has ended with {process.poll()}"
    )
    log = await _in_thread((kubelet.paths.root / "log").read_text)
    raise SystemExit(
        f"the kubelet has {dict(kubelet.allocatable())} of the plugin's {devices} devices; {state}; its log:\n{log}"
    )


async def _measure_start(plugins: Sequence[Plugin], gpus: int, rounds: int, work: Path, results: Results) -> None:
    """Measure the time from a process's start until the kubelet has all devices, each plugin in turn."""
    starts: dict[str, list[Serving]] = {plugin.name: [] for plugin in plugins}
    for number in range(-1, rounds):
        for plugin in plugins:
            async with _serving(plugin, gpus, work) as serving:
                if number >= 0:  # the first start compiles the modules
                    starts[plugin.name].append(serving)
    for name, found in starts.items():
        results.add(name, f"start to {gpus} GPUs registered, s", statistics.median(start.start_s for start in found))
        cpu = statistics.median(start.start_cpu_s for start in found)
        results.add(name, f"... processor time until then, {gpus} GPUs, s", cpu)


def _request(serving: Serving, count: int) -> pb.AllocateRequest:
    return pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=serving.devices[:count])])


def _call(channel: grpc.Channel) -> Call:
    return channel.unary_unary(
        "/v1beta1.DevicePlugin/Allocate", pb.AllocateRequest.SerializeToString, pb.AllocateResponse.FromString
    )


def _write_answers(ours: Serving, folder: Path) -> None:
    """Write the answers of gpuvirt's plugin, so that the floor gives the same."""
    with grpc.insecure_channel(f"unix:{ours.socket}") as channel:
        for count in (1, GPUS):
            (folder / str(count)).write_bytes(_call(channel)(_request(ours, count)).SerializeToString())


def _measure_allocate(serving: Mapping[str, Serving], calls: int, results: Results) -> None:
    """Measure Allocate of all plugins in turn, call by call, so that other work affects all of them equally."""
    with ExitStack() as stack:
        channels = {
            name: stack.enter_context(grpc.insecure_channel(f"unix:{plugin.socket}"))
            for name, plugin in serving.items()
        }
        for count in (1, GPUS):
            targets = {name: (_call(channels[name]), _request(plugin, count)) for name, plugin in serving.items()}
            _latencies(targets, calls // 10)  # warms up
            before = {name: cpu_s(plugin.pid) for name, plugin in serving.items()}
            latencies = _latencies(targets, calls)
            for name, plugin in serving.items():
                for figure, percent in (("p50", 50), ("p99", 99)):
                    value = statistics.quantiles(latencies[name], n=100, method="inclusive")[percent - 1]
                    results.add(name, f"Allocate of {count}, {figure}, us", value * 1e6)
                spent = (cpu_s(plugin.pid) - before[name]) / calls
                results.add(name, f"Allocate of {count}, the plugin's processor time, us", spent * 1e6)


def _latencies(targets: Mapping[str, tuple[Call, pb.AllocateRequest]], calls: int) -> Mapping[str, list[float]]:
    """Return the duration of each call; the order of the plugins is reversed after each round."""
    latencies: dict[str, list[float]] = {name: [] for name in targets}
    order = list(targets)
    for _ in range(calls):
        for name in order:
            call, request = targets[name]
            began = time.perf_counter()
            call(request)
            latencies[name].append(time.perf_counter() - began)
        order.reverse()
    return latencies


def _use(serving: Serving) -> None:
    """Make some calls, because the memory of a plugin is measured after use."""
    with grpc.insecure_channel(f"unix:{serving.socket}") as channel:
        for count in (1, GPUS):
            _latencies({"used": (_call(channel), _request(serving, count))}, USED_CALLS)


async def _in_thread(work: Callable[[], T]) -> T:
    """Run blocking work beside the kubelets, which run on this event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, work)


async def _measure_idle(plugin: Plugin, idle_s: float, work: Path, results: Results) -> None:
    """Measure the memory and processor time of an idle plugin, while no other plugin runs."""
    async with _serving(plugin, GPUS, work) as serving:
        await _in_thread(lambda: _use(serving))
        await asyncio.sleep(SETTLED_AFTER_S)
        before, began = cpu_s(serving.pid), time.monotonic()
        await asyncio.sleep(idle_s)
        burnt = (cpu_s(serving.pid) - before) / (time.monotonic() - began)
        results.add(plugin.name, f"CPU idle with {GPUS} GPUs, s an hour", burnt * 3600)
        results.add(plugin.name, f"PSS idle with {GPUS} GPUs, MB", pss_kib(serving.pid) * 1024 / 1e6)
        results.add(plugin.name, "... of which shared with no other process, MB", private_kib(serving.pid) * 1024 / 1e6)
