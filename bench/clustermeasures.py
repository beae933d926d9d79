"""The measures of bench.cluster: each changes nodes, waits for the labels of their operands, and adds figures."""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from lab.cluster.cluster import Cluster

from bench.clusterapi import MERGE, STRATEGIC, OperandLabels, Requests, watched
from bench.clusternodes import heartbeat, name_of, node, operands_of
from bench.clusterprograms import Cost, Running
from gpuvirt.model.desired.workload import LABEL, Workload

IDLE_S = 30.0
HEARTBEATS_S = 30.0
HEARTBEAT_EVERY_S = 10.0
JOINING = 100
AFTER_RESTART_S = 15.0
MINUTE_S = 60.0


@dataclass
class Fleet:
    """The nodes on the API server, and the program that is measured over them."""

    lab: Cluster
    requests: Requests
    nodes: int
    rows: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, Mapping[str, int]] = field(default_factory=dict)
    """The requests of each measure, by verb and resource."""
    made: int = 0

    def add(self, what: str, value: float) -> None:
        """Add a figure."""
        self.rows[what] = value
        print(f"  {what}: {value:.4g}", file=sys.stderr)

    def add_cost(self, what: str, cost: Cost) -> None:
        """Add the requests, connections and processor time of a measure."""
        self.add(f"{what}: requests", cost.requests.total())
        self.add(f"{what}: connections", cost.connections)
        self.add(f"{what}: CPU, s", cost.cpu_s)
        self.kinds[what] = dict(cost.requests)

    def join(self, count: int) -> Sequence[str]:
        """Create more nodes, all for whole GPUs, and return their names."""
        numbers = range(self.made, self.made + count)
        self.made += count
        self.requests.each(numbers, self._join)
        return [name_of(number) for number in numbers]

    def label(self, name: str, workload: Workload) -> None:
        """Set the workload of a node."""
        path = f"/api/v1/nodes/{name}?fieldManager=kubectl-label"
        self.requests.ask("PATCH", path, {"metadata": {"labels": {LABEL: str(workload)}}}, MERGE)

    def beat(self, name: str) -> None:
        """Send the heartbeat of a node."""
        path = f"/api/v1/nodes/{name}/status?fieldManager=kubelet"
        self.requests.ask("PATCH", path, heartbeat(now()), STRATEGIC)

    def _join(self, number: int) -> None:
        content = node(number, Workload.PASSTHROUGH, now())
        self.requests.ask("POST", "/api/v1/nodes?fieldManager=kubelet", content)


def now() -> datetime:
    """Return the time, as kubelets write it."""
    return datetime.now().astimezone()


def until_all_done(labels: OperandLabels, program: Running) -> tuple[float, float]:
    """Wait for the awaited labels, and until the program is quiet; return both moments."""
    labelled_s = labels.wait(program.check)
    return labelled_s, max(labelled_s, program.until_quiet())


def measure_start(fleet: Fleet, program: Running) -> None:
    """Measure a program that has just started."""
    with watched(fleet.requests) as labels:
        labels.expect(operands_of(Workload.PASSTHROUGH), map(name_of, range(fleet.made)))
        labelled_s, quiet_s = until_all_done(labels, program)
    fleet.add("start: all nodes labelled, s", labelled_s - program.began_s)
    fleet.add("start: last request, s", quiet_s - program.began_s)
    fleet.add_cost("start", program.cost())


def measure_relabel(fleet: Fleet, program: Running) -> None:
    """Give all nodes another workload, as fast as the API server takes it."""
    names = [name_of(number) for number in range(fleet.nodes)]
    with watched(fleet.requests) as labels:
        labels.expect(operands_of(Workload.VGPU), names)
        began_s, before = time.monotonic(), program.cost()
        fleet.requests.each(names, lambda name: fleet.label(name, Workload.VGPU))
        written_s = time.monotonic()
        labelled_s, quiet_s = until_all_done(labels, program)
        cost = program.cost() - before
    fleet.add("another workload: given to all nodes by the bench, s", written_s - began_s)
    fleet.add("another workload: all nodes labelled, s", labelled_s - began_s)
    fleet.add("another workload: last request, s", quiet_s - began_s)
    fleet.add_cost("another workload", cost)
    fleet.add("another workload: CPU of a node, ms", cost.cpu_s * 1000 / fleet.nodes)


def measure_idle(fleet: Fleet, program: Running) -> None:
    """Leave the program alone."""
    before = program.cost()
    time.sleep(IDLE_S)
    cost = program.cost() - before
    fleet.add("left alone: CPU a minute, s", cost.cpu_s * MINUTE_S / IDLE_S)
    fleet.add("left alone: requests a minute", cost.requests.total() * MINUTE_S / IDLE_S)
    fleet.kinds["left alone"] = dict(cost.requests)
    fleet.add("left alone: memory (PSS), MiB", program.memory_mib())


def measure_join(fleet: Fleet, program: Running) -> None:
    """Let nodes join at once."""
    with watched(fleet.requests) as labels:
        began_s, before = time.monotonic(), program.cost()
        labels.expect(operands_of(Workload.PASSTHROUGH), [name_of(fleet.made + number) for number in range(JOINING)])
        fleet.join(JOINING)
        labelled_s, _ = until_all_done(labels, program)
        cost = program.cost() - before
    fleet.add(f"{JOINING} nodes join at once: labelled, s", labelled_s - began_s)
    fleet.add_cost(f"{JOINING} nodes join at once", cost)


def measure_one(fleet: Fleet, program: Running) -> None:
    """Give one node another workload, and then the next: the time from the request to the labels."""
    names = [name_of(number) for number in range(fleet.made - JOINING, fleet.made)]
    took_ms = []
    with watched(fleet.requests) as labels:
        labels.expect(operands_of(Workload.PASSTHROUGH), names)
        labels.wait(program.check)
        before = program.cost()
        for name in names:
            labels.expect(operands_of(Workload.VGPU), [name])
            began_s = time.monotonic()
            fleet.label(name, Workload.VGPU)
            took_ms.append((labels.wait(program.check) - began_s) * 1000)
        program.until_quiet()
        cost = program.cost() - before
    fleet.add("one node: labelled, p50, ms", percentile(took_ms, 50))
    fleet.add("one node: labelled, p99, ms", percentile(took_ms, 99))
    fleet.add("one node: CPU, ms", cost.cpu_s * 1000 / len(names))
    fleet.add("one node: requests", cost.requests.total() / len(names))
    fleet.kinds["one node"] = dict(cost.requests)


def measure_heartbeats(fleet: Fleet, program: Running) -> None:
    """Send the heartbeats of all nodes every 10 s, or as many as the API server takes; nothing else happens."""
    names = [name_of(number) for number in range(fleet.made)]
    before, began_s = program.cost(), time.monotonic()
    sent = paced(fleet.requests, names, fleet.beat, len(names) / HEARTBEAT_EVERY_S, HEARTBEATS_S)
    took_s = time.monotonic() - began_s
    time.sleep(1)
    cost = program.cost() - before
    fleet.add("heartbeats: sent, of all in 10 s", sent / took_s / (len(names) / HEARTBEAT_EVERY_S))
    due = len(names) * MINUTE_S / HEARTBEAT_EVERY_S
    fleet.add("heartbeats: CPU a minute if all are sent, s", cost.cpu_s / sent * due)
    fleet.add("heartbeats: requests a minute", cost.requests.total() * MINUTE_S / took_s)
    fleet.kinds["heartbeats"] = dict(cost.requests)


def measure_restart(fleet: Fleet, program: Running) -> None:
    """Restart the API server; a node that joins as soon as it is ready again shows when the program works again."""
    before = program.cost()
    fleet.lab.stop("apiserver")
    fleet.lab.start_api_server()
    began_s = time.monotonic()
    with watched(fleet.requests) as labels:
        labels.expect(operands_of(Workload.PASSTHROUGH), [name_of(fleet.made)])
        fleet.join(1)
        labelled_s = labels.wait(program.check)
    time.sleep(AFTER_RESTART_S)
    cost = program.cost() - before
    fleet.add("API server restarted: a new node labelled, s", labelled_s - began_s)
    fleet.add_cost("API server restarted", cost)
    fleet.add("API server restarted: memory (PSS), MiB", program.memory_mib())


MEASURES: Mapping[str, Callable[[Fleet, Running], None]] = {
    "relabel": measure_relabel,
    "idle": measure_idle,
    "join": measure_join,
    "one": measure_one,
    "heartbeats": measure_heartbeats,
    "restart": measure_restart,
}
"""The measures after the start, in their order."""
NEEDS = {"one": "join"}
"""Measures that need nodes which another one has created."""


def chosen(names: Iterable[str]) -> Sequence[str]:
    """Return the named measures and those that they need, in their order."""
    needed = set(names)
    needed |= {NEEDS[name] for name in needed if name in NEEDS}
    return [name for name in MEASURES if name in needed]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that so many percent of all do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def paced(
    requests: Requests, names: Sequence[str], act: Callable[[str], object], rate: float, duration_s: float
) -> int:
    """Call `act` for each name in turn, `rate` times a second or as often as possible; return how often."""
    began_s, lock, sent = time.monotonic(), threading.Lock(), 0

    def work(_: int) -> None:
        nonlocal sent
        while True:
            with lock:
                number, sent = sent, sent + 1
            due_s = began_s + number / rate
            if max(due_s, time.monotonic()) >= began_s + duration_s:
                with lock:
                    sent -= 1
                return
            time.sleep(max(0.0, due_s - time.monotonic()))
            act(names[number % len(names)])

    requests.each(range(8), work)
    return sent
