"""Measures our extender and another one, one after the other, over the same nodes and pods of a real API server."""

import asyncio
import multiprocessing
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Lock

import msgspec
from lab.cluster.cluster import Cluster

from bench.contenders import Contender, Placing, Sent, send_from
from bench.dialects import GPUVIRT, UNITS
from bench.extenderclients import p50_p99
from bench.extenderobjects import ALLOCATED, GPUS, Loaded, load
from bench.packing import best_fit
from bench.peerpacking import PACKING, PACKING_NODES, free_after, random_trace
from bench.process import cpu_s, pss_kib
from bench.results import Results

CLIENTS = 8
ASKED_UNITS = 300
LISTENS = ("--listen", GPUVIRT.url.removeprefix("http://"), "--metrics-listen", "")
OURS = (sys.executable, "-m", "gpuvirt", "extender", "--no-elect", *LISTENS)
RACE_NODES = 4
RACE_PODS = 160
"""96 of them fit."""
RACE_PODS_OF_MANY = 64
"""Pods that clients place at once on as many nodes as are bound to, where all of them fit."""
PATIENCE = 4
"""How many times as long placing pods may take as a figure; so may the filter requests before bindings."""
PARTS = ("filter", "bind", "race", "packing")


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is measured."""

    nodes: int
    pods: int
    rounds: int
    """Filter requests of one client, and of eight clients together."""
    bindings: int
    """Pods that are bound, each on a node of its own."""
    within_s: float
    """No request is sent after this time, for each figure."""
    ready_within_s: float = 300.0


def measured(lab: Cluster, peer: Contender, amounts: Amounts, parts: Collection[str] = PARTS) -> Results:
    """Measure both extenders."""
    results = Results(verbose=True)
    contenders = (Contender(GPUVIRT, GPUVIRT.url, OURS), peer)

    def loaded(nodes: int, allocated: int, asked: Sequence[int]) -> Loaded:
        start(lab)
        dialects = [contender.dialect for contender in contenders]
        return asyncio.run(load(lab.kubeconfig, dialects, nodes, allocated, asked))

    if "filter" in parts:
        objects = loaded(amounts.nodes, amounts.pods, [ASKED_UNITS] * CLIENTS)
        for contender in contenders:
            _measure_large(lab, contender, objects, amounts, results)
    if "bind" in parts:
        objects = loaded(amounts.bindings, 0, [ASKED_UNITS] * (amounts.bindings + RACE_PODS_OF_MANY))
        for contender in contenders:
            _measure_bind(lab, contender, objects, amounts, results)
    for how in (Race("filter at once"), Race("filter one at a time", one_at_a_time=True)) if "race" in parts else ():
        objects = loaded(RACE_NODES, 0, [ASKED_UNITS] * RACE_PODS)
        for contender in contenders:
            pods = objects.asked[contender.dialect.name]
            first = contender.filter(*next(iter(pods.items())), objects.nodes, ASKED_UNITS)
            placing = Placing(contender, objects.nodes, ASKED_UNITS, PATIENCE * amounts.within_s, lab.api)
            with contender.running(lab.kubeconfig, first, amounts.ready_within_s):
                _measure_race(lab, placing, objects, pods, how, results)
    if "packing" in parts:
        trace = random_trace(PACKING_NODES * GPUS)
        objects = loaded(PACKING_NODES, 0, trace)
        for contender in contenders:
            _measure_packing(lab, contender, objects, trace, amounts, results)
    return results


def start(lab: Cluster) -> None:
    """Start an API server without objects."""
    lab.up_control_plane()
    lab.kubectl("create", "serviceaccount", "default", "--namespace", "default")


def _measure_large(lab: Cluster, contender: Contender, loaded: Loaded, amounts: Amounts, results: Results) -> None:
    name = contender.dialect.name
    asked = list(loaded.asked[name].items())
    requests = [contender.filter(pod, uid, loaded.nodes, ASKED_UNITS) for pod, uid in asked]
    with contender.running(lab.kubeconfig, requests[0], amounts.ready_within_s) as (pid, ready_s):
        results.add(name, f"ready after a start, {amounts.nodes:,} nodes, {amounts.pods:,} pods, s", ready_s)
        send_from(contender.url, [requests[:1] * 5], amounts.within_s)
        before_s = cpu_s(pid)
        sent = send_from(contender.url, [requests[:1] * amounts.rounds], amounts.within_s)
        used_ms = (cpu_s(pid) - before_s) * 1000 / len(sent.took_ms)
        results.add(name, "filter, 1 client, processor time of a request, ms", used_ms)
        _add(results, name, "filter, 1 client", sent)
        results.add(name, "filter, nodes in the answer", len(sent.verdicts[0].names or ()))
        clients = [[request] * max(amounts.rounds // CLIENTS, 1) for request in requests]
        _add(results, name, f"filter, {CLIENTS} clients", send_from(contender.url, clients, amounts.within_s))
        results.add(name, "memory (PSS) then, MiB", pss_kib(pid) / 1024)


def _add(results: Results, name: str, what: str, sent: Sent) -> None:
    p50, p99 = p50_p99(sent.took_ms)
    results.add(name, f"{what}, p50, ms", p50)
    results.add(name, f"{what}, p99, ms", p99)
    results.add(name, f"{what}, requests/s", len(sent.took_ms) / sent.seconds)
    results.add(name, f"{what}, requests", len(sent.took_ms))
    results.add(name, f"{what}, errors", sum(bool(verdict.error) for verdict in sent.verdicts))


def _measure_bind(lab: Cluster, contender: Contender, loaded: Loaded, amounts: Amounts, results: Results) -> None:
    """Place some pods at once; then bind each of the others to a node of its own.

    Filter is sent before bind, because HAMi chooses the GPU there.
    """
    name = contender.dialect.name
    pods = list(loaded.asked[name].items())
    places = list(zip(pods[RACE_PODS_OF_MANY:], loaded.nodes, strict=True))
    chosen = [contender.filter(pod, uid, [node], ASKED_UNITS) for (pod, uid), node in places]
    with contender.running(lab.kubeconfig, chosen[0], amounts.ready_within_s):
        placing = Placing(contender, loaded.nodes, ASKED_UNITS, PATIENCE * amounts.within_s, lab.api)
        _measure_race(lab, placing, loaded, dict(pods[:RACE_PODS_OF_MANY]), Race("filter at once"), results)
        clients = [chosen[index::CLIENTS] for index in range(CLIENTS)]
        filtered = send_from(contender.url, clients, PATIENCE * amounts.within_s)
        # Each client sends its requests in turn, so that those which were answered are the first of each.
        fitting = {node for verdict in filtered.verdicts for node in verdict.names or ()}
        binds = [contender.bind(pod, uid, node) for (pod, uid), node in places if node in fitting]
        clients = [binds[index::CLIENTS] for index in range(CLIENTS)]
        what = f"bind, {amounts.bindings:,} nodes, {CLIENTS} clients"
        _add(results, name, what, send_from(contender.url, clients, amounts.within_s))


def _measure_packing(
    lab: Cluster, contender: Contender, loaded: Loaded, trace: Sequence[int], amounts: Amounts, results: Results
) -> None:
    name = contender.dialect.name
    pods = list(zip(loaded.asked[name].items(), trace, strict=True))
    (pod, uid), units = pods[0]
    with contender.running(lab.kubeconfig, contender.filter(pod, uid, loaded.nodes, units), amounts.ready_within_s):
        free = free_after(contender, loaded.nodes, pods, lab.api)
    gpus = len(loaded.nodes) * GPUS
    results.add(name, f"{PACKING}, %", free / (gpus * UNITS) * 100)
    results.add(name, "... best fit with perfect knowledge, %", best_fit(trace, gpus) / (gpus * UNITS) * 100)


@dataclass(frozen=True, slots=True)
class Race:
    """How clients place pods at once."""

    how: str
    one_at_a_time: bool = False
    """Whether one client at a time sends a filter request, as one kube-scheduler does."""


def _measure_race(
    lab: Cluster, placing: Placing, loaded: Loaded, pods: Mapping[str, str], race: Race, results: Results
) -> None:
    contender, items = placing.contender, list(pods.items())
    name = contender.dialect.name
    turn = multiprocessing.Lock() if race.one_at_a_time else None
    with multiprocessing.Pool(CLIENTS, _take_turns, (turn,)) as pool:
        found = pool.starmap(_place, [(placing, dict(items[index::CLIENTS])) for index in range(CLIENTS)])
    shares = given(lab, contender, loaded)
    what = f"{len(pods)} pods on {len(loaded.nodes) * GPUS:,} GPUs, {CLIENTS} clients, {race.how}"
    results.add(name, f"{what}: overcommitted GPUs", shares.overcommitted)
    results.add(name, f"{what}: pods bound without a GPU", shares.without_gpu)
    results.add(name, f"{what}: pods bound", sum(bound for bound, _ in found))
    results.add(name, f"{what}: bindings refused", sum(refused for _, refused in found))


_turn: Lock | None = None


def _take_turns(turn: Lock | None) -> None:
    global _turn  # noqa: PLW0603  a lock reaches a worker of a pool at its start alone
    _turn = turn


def _place(placing: Placing, pods: Mapping[str, str]) -> tuple[int, int]:
    return placing.place(pods, _turn)


class _Metadata(msgspec.Struct):
    name: str
    annotations: dict[str, str] = {}


class _Spec(msgspec.Struct):
    node: str = msgspec.field(name="nodeName", default="")


class _Pod(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec


class _Pods(msgspec.Struct):
    items: list[_Pod]


@dataclass(frozen=True, slots=True)
class Given:
    """The counts of wrong allocations, by the pods of the API server."""

    overcommitted: int
    """GPUs with more than their units."""
    without_gpu: int
    """Pods that are bound and have no GPU."""


def given(lab: Cluster, contender: Contender, loaded: Loaded) -> Given:
    """Count the units of each GPU by the annotations of the API server's pods."""
    found = msgspec.json.decode(lab.api.get("/api/v1/namespaces/default/pods") or b"{}", type=_Pods)
    asked = loaded.asked[contender.dialect.name]
    return counted(
        contender.dialect.given(pod.spec.node, pod.metadata.annotations)
        for pod in found.items
        if pod.spec.node and (pod.metadata.name in asked or pod.metadata.name.startswith(ALLOCATED))
    )


def counted(shares: Iterable[Mapping[str, int]]) -> Given:
    """Count the units that bound pods have."""
    units: Counter[str] = Counter()
    without = 0
    for share in shares:
        units.update(share)
        without += not share
    return Given(sum(count > UNITS for count in units.values()), without)
