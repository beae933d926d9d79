"""How long a node takes from the name of a vGPU config to the new vGPUs in the kubelet, and a host to carry them.

The agent, its sockets, its waiting times and the kubelet's calls are real. The host is a simulated kernel in the same
process, which creates and removes vGPUs faster than a real one. `measure_apply` measures `gpuvirt vgpu apply`, or
another program, over a mounted host.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpuvirt.agent.agent import Agent
from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.process import run
from gpuvirt.agent.store import agentstate
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import NodeName
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import NodeRequest, Observed, StateName
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory import pciids
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.node.desirednode import RequestTerms
from gpuvirt.model.node.picture import NodeTerms
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.kubelet.kubelet import SimKubelet, running
from gpuvirt_sim.programs.tools import SimTools

GPUS = 8
WITHIN_S = 60.0
OURS = (sys.executable, "-m", "gpuvirt", "vgpu", "apply")

PEER = """
set -e
mount --make-rprivate /
mount --rbind "$GPUVIRT_HOST_ROOT/sys" /sys
unset GPUVIRT_HOST_ROOT
exec "$@"
"""
"""Mounts the host's `/sys` where a program with fixed paths reads it, in a mount namespace of its own."""

POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class MeasuredHost:
    """A simulated host that can carry two sets of vGPUs."""

    about: str
    board: str
    few: tuple[str, int]
    """A config, and its number of vGPUs on each GPU."""
    many: tuple[str, int]

    @property
    def text(self) -> str:
        """The host file."""
        slots = (
            f"at: '{slot.at}', board: {slot.board}, group: {slot.group}, vfs: {slot.vfs}" for slot in self.spec.slots
        )
        return f"about: {self.about}\nslots:\n{''.join(f'  - {{{slot}}}{chr(10)}' for slot in slots)}"

    @property
    def configs(self) -> str:
        """Both configs, in the grammar of vgpu-device-manager."""
        entries = (
            f"  {name}: [{{devices: all, vgpu-devices: {{{name}: {each}}}}}]\n" for name, each in (self.few, self.many)
        )
        return f"version: v1\nvgpu-configs:\n{''.join(entries)}"

    @property
    def spec(self) -> HostSpec:
        """The host, with VFs and no vGPUs."""
        slots = tuple(
            SlotSpec(
                at=f"0000:{0x10 * (number + 1):02x}:00.0",
                board=self.board,
                group=11 + number,
                numa=number // 4,
                vfs=32,
            )
            for number in range(GPUS)
        )
        return HostSpec(about=self.about, slots=slots)


HOSTS = (
    MeasuredHost("mdev on A10", "A10", few=("A10-8Q", 3), many=("A10-2Q", 12)),
    MeasuredHost("vendor VFIO on L40S", "L40S", few=("L40S-24Q", 2), many=("L40S-4Q", 12)),
)


def change_host_of(kernel: SimKernel, folder: Path) -> ChangeHost:
    """Return the host for changes of a simulated host."""
    return ChangeHost(kernel, SimTools(kernel), folder / "drivers.json", folder / "locks", folder / "device-plugins")


def options_of(kernel: SimKernel, folder: Path) -> NodeOptions:
    """Return the options of an agent that creates vGPUs, at its usual intervals."""
    return NodeOptions(
        kernel=kernel,
        kubelet=KubeletPaths(folder),
        ledger=folder / "ledger.json",
        gates=folder / "locks",
        state_file=folder / "node.json",
        terms=NodeTerms(
            Settings(mode=DesiredMode.VGPU), PciIds((pciids.shipped(),)), request=RequestTerms(in_cluster=True)
        ),
        node_name=NodeName("node01"),
        desired_state=folder / agentstate.DESIRED_FILE,
        change_host=change_host_of(kernel, folder),
    )


@asynccontextmanager
async def agent_on(options: NodeOptions) -> AsyncIterator[Agent]:
    """Run an agent for as long as the context lasts."""
    started: asyncio.Future[Agent] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(run(options, started=started.set_result))
        yield await started
        task.cancel()


async def until(met: Callable[[], bool], what: Callable[[], object]) -> None:
    """Wait until a condition is met; exit with `what` when it takes too long."""
    deadline = time.monotonic() + WITHIN_S
    while not met():
        if time.monotonic() > deadline:
            raise SystemExit(f"not reached after {WITHIN_S:g} s: {what()}")
        await asyncio.sleep(POLL_S)


async def relabelled_s(agent: Agent, kubelet: SimKubelet, config: str, count: int) -> float:
    """Set the node's label to a config; return how long it takes until all its vGPUs are allocatable."""
    resource = f"nvidia.com/NVIDIA_{config}"
    began = time.monotonic()
    agent.observations.take_request(NodeRequest(Observed(config), Observed(None)))
    await until(lambda: kubelet.allocatable().get(resource, 0) == count, kubelet.allocatable)
    took_s = time.monotonic() - began
    await until(lambda: _succeeded(agent), agent.reports.vgpus.get)
    return took_s


def _succeeded(agent: Agent) -> bool:
    state = agent.reports.vgpus.get()
    return state is not None and state.name is StateName.SUCCESS


async def measure_label(host: MeasuredHost, rounds: int, folder: Path) -> tuple[float, float]:
    """Return the medians of the seconds from few to many vGPUs, and from many to few."""
    kernel = build_host(host.spec, where=host.about)
    more, fewer = [], []
    async with running(folder, RealClock()) as kubelet, agent_on(options_of(kernel, folder)) as agent:
        (few, few_each), (many, many_each) = host.few, host.many
        await relabelled_s(agent, kubelet, few, GPUS * few_each)
        for _ in range(rounds):
            more.append(await relabelled_s(agent, kubelet, many, GPUS * many_each))
            fewer.append(await relabelled_s(agent, kubelet, few, GPUS * few_each))
    return statistics.median(more), statistics.median(fewer)


@contextmanager
def mounted(measured: MeasuredHost, work: Path) -> Iterator[Path]:
    """Mount a host for as long as the context lasts, and provide its root."""
    file, host = work / "host.yaml", work / "host"
    file.write_text(measured.text)
    host.mkdir()
    command = [sys.executable, "-m", "gpuvirt", "sim", "mount", "--host", str(file), str(host)]
    log = work / "mount.log"  # libfuse writes to it, too
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as server,
    ):
        if server.stdout is None or "is mounted" not in server.stdout.readline():
            messages = log.read_text(errors="replace")
            raise SystemExit(f"the host can't be mounted: it needs the extra sim, fuse3 and /dev/fuse\n{messages}")
        try:
            yield host
        finally:
            server.terminate()


def measure_apply(command: Sequence[str], rounds: int, work: Path, *, wants_fixed_paths: bool = False) -> float:
    """Return the median of the seconds in which `command -f FILE -c NAME` creates many vGPUs on a mounted host."""
    measured = HOSTS[0]
    configs = work / "configs.yaml"
    configs.write_text(measured.configs)
    times = []
    with mounted(measured, work) as host:
        environment = os.environ | {"GPUVIRT_HOST_ROOT": str(host)}

        def apply(program: Sequence[str], name: str) -> None:
            arguments = [*program, "-f", str(configs), "-c", name]
            done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{' '.join(arguments)}: {done.stdout}{done.stderr}")

        ahead = ("unshare", "--mount", "sh", "-c", PEER, "sh") if wants_fixed_paths else ()
        for _ in range(rounds):
            apply(OURS, measured.few[0])
            began = time.monotonic()
            apply((*ahead, *command), measured.many[0])
            times.append(time.monotonic() - began)
            made = len(list((host / "sys/bus/mdev/devices").iterdir()))
            if made != GPUS * measured.many[1]:
                raise SystemExit(f"{' '.join(command)} has left {made} vGPUs; expected {GPUS * measured.many[1]}")
    return statistics.median(times)
