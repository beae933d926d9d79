"""Switches while controllers are killed anywhere, calls fail, answers are lost, and a budget forbids evictions.

Controllers are processes that SIGKILL ends, with children of their own that pyVmomi has; the vCenter is simulated, and
one of its calls in ten fails. Time is fast. Each switch ends in the current phase, or is held with its reason.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from random import Random

import pytest

from gpuvirt.model.reasons import ReasonCode
from tests.agent.kubelet.kubeletnode import until
from tests.hypervisors.simulated import PASSWORD
from tests.kube.scriptedapi import Call, Reply, scripted
from tests.schedules.controlled import WORKERS, living, vm_cluster
from tests.schedules.fastclock import REAL, FastClock
from tests.schedules.killablecontroller import Controllers, controllers
from tests.schedules.vmcluster import SPEC, VmCluster
from tests.thoroughness import sized
from tests.web.certificates import Authority, Pair

pytestmark = pytest.mark.ring("vsphere")
NOON = datetime.fromisoformat("2026-01-05T11:00:00+00:00")
RATE = 30.0
SEEDS = sized(20, 1)
SWITCHES = 10
METHODS = ("SuspendVM_Task", "PowerOnVM_Task", "RetrievePropertiesEx", "CreateContainerView", "Login")
PATIENCE_S = 100.0
"""How long a switch may take, in real time: its deadlines are 60 s of it."""
KILLED_S = 10.0
"""How long controllers are killed in a switch, in real time: the deadlines count again from each leader."""
LOST = 0.02
"""How many requests, or their answers, are lost."""
KILLED_WITHIN = 300
"""After how many requests a controller is killed at the latest: a switch has some more."""
BUDGETS = (0, 0, 0, 2, 5)
"""How many pods have to run: none, so that all may be evicted, some, or all."""
REACHED = "reached"
OF_SCHEDULES = ("/vgpuschedules", "/nodes", "/pods", "/leases/worker", "/volumeattachments", "/secrets", "/events")


class Chaos:
    """The faults of the API server, and the deaths of the controller, by a seed."""

    def __init__(self, cluster: VmCluster, seed: int) -> None:
        self.cluster = cluster
        self.random = Random(seed)
        self.controllers: Controllers | None = None
        self.is_calm = False
        self.spares = False
        """Whether no controller is killed any more in this switch."""
        self.happened = Counter[str]()
        self._kill_in = 0

    def answer(self, call: Call) -> Reply | None:
        """Answer a request, or break its connection, before or after what it asks for is done; or kill the sender."""
        if self.is_calm or "watch=" in call.target or not any(part in call.path for part in OF_SCHEDULES):
            return self.cluster.answer(call)
        self._kill_in -= 1
        dies = self._kill_in == 0 and not self.spares
        is_before = self.random.random() < 0.5
        if dies and is_before:
            self.kill("before a request was carried out")
        if dies or self.random.random() < LOST:
            self.happened["lost requests" if is_before else "lost answers"] += 1
            if not is_before:
                self.cluster.answer(call)
            if dies and not is_before:
                self.kill("after a request was carried out")
            raise ConnectionResetError
        return self.cluster.answer(call)

    def kill(self, when: str) -> None:
        """Kill the controller; another one starts."""
        assert self.controllers is not None
        self.controllers.kill()
        self.happened[f"killed {when}"] += 1
        self.kill_later()

    def kill_later(self) -> None:
        """Choose when the controller dies next."""
        self._kill_in = self.random.randrange(1, KILLED_WITHIN)


async def replace_controllers(chaos: Chaos) -> None:
    """Start controllers, and kill some at the moment at which the vCenter has begun a call."""
    assert chaos.controllers is not None
    calls = 0
    while True:
        begun = len(chaos.cluster.vcenter.state.calls)
        if begun > calls and not chaos.is_calm and not chaos.spares and chaos.random.random() < 0.15:
            chaos.kill("in a call")
        calls = begun
        if not chaos.controllers.is_running:
            chaos.controllers.start()
        await REAL.sleep(0.005)


@asynccontextmanager
async def disturbed(chaos: Chaos, server: Pair, ca: Path, output: Path) -> AsyncIterator[None]:
    """Let the cluster live, with controllers that die."""
    async with scripted(chaos.answer, server, ca) as api, living(chaos.cluster), asyncio.TaskGroup() as group:
        with controllers(api.port, ca, chaos.cluster.clock, output) as found:
            chaos.controllers = found
            task = group.create_task(replace_controllers(chaos))
            yield
            task.cancel()


def begin(cluster: VmCluster, phase: str) -> None:
    """Begin a switch."""
    cluster.put_spec({**SPEC, "overrides": [{"phase": phase, "from": "2026-01-01T00:00", "until": "2027-01-01T00:00"}]})


async def ended(chaos: Chaos, phase: str) -> str:
    """Return the code by which a switch is held, or `REACHED`."""
    cluster, began_s = chaos.cluster, REAL.monotonic_s()
    while not cluster.has_reached(phase):
        status, code = cluster.conditions().get("Held", ("", ""))
        is_of_now = cluster.status().get("observedGeneration") == cluster.generation
        if status == "True" and is_of_now:
            return code
        took_s = REAL.monotonic_s() - began_s
        chaos.spares = took_s > KILLED_S
        assert took_s < PATIENCE_S, f"stuck: {cluster.status()}"
        await REAL.sleep(0.01)
    return REACHED


def verify_reached(cluster: VmCluster, phase: str) -> None:
    """Compare the VMs and the cordons with a phase."""
    serving = set(WORKERS) if phase == "day" else {"worker4"}
    power = cluster.vcenter.state.power
    assert {name for name, state in power.items() if state == "poweredOn"} == serving
    assert not {name: cordon for name, cordon in cluster.cordons().items() if name in serving and cordon != (False, "")}


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_switches_end_or_are_held_with_their_reason(
    tmp_path: Path, authority: Authority, server: Pair, seed: int
) -> None:
    with vm_cluster(tmp_path, authority, FastClock(RATE, NOON)) as (cluster, vcenter):
        for method in METHODS:
            vcenter.vsphere.command(fault={"method": method, "every": 10, "most": 0, "kind": "system"})
        vcenter.vsphere.command(taskDelays={"Suspend": 150, "PowerOn": 100})
        chaos, results = Chaos(cluster, seed), Counter[str]()
        output = tmp_path / "log"
        async with disturbed(chaos, server, authority.certificate, output):
            for number in range(SWITCHES):
                phase = ("night", "day")[number % 2]
                cluster.min_available = chaos.random.choice(BUDGETS)
                chaos.kill_later()
                begin(cluster, phase)
                if chaos.random.random() < 0.1:  # the spec changes in the middle of a switch
                    await REAL.sleep(chaos.random.random())
                    begin(cluster, phase)
                result = await ended(chaos, phase)
                results[result] += 1
                if result == REACHED:
                    verify_reached(cluster, phase)
                assert cluster.violations == []
            chaos.is_calm, cluster.min_available = True, 0
            vcenter.vsphere.command(clear=True)
            begin(cluster, "day")
            await until(lambda: cluster.has_reached("day"))
            verify_reached(cluster, "day")
            await until(lambda: all(cluster.running(name) for name in WORKERS))
    assert set(results) <= {REACHED, *ReasonCode}
    assert results[REACHED] > 0
    assert chaos.controllers is not None
    assert chaos.controllers.killed > 1
    assert PASSWORD not in output.read_text()
    assert cluster.violations == []
