"""A cluster whose workers are the VMs of a simulated vCenter: API server, kubelets, scheduler and a budget.

All go by the power that the vCenter shows, in a time that runs fast.
"""

import json
from base64 import b64encode
from enum import StrEnum

import msgspec
from lab.vsphere.simulator import VSphere
from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.model.workers.connection import HypervisorCredentials
from tests.kube.scriptedapi import NOT_FOUND, Call, Reply
from tests.schedules.fastclock import REAL, FastClock
from tests.schedules.servedschedule import BLOCKED, LEASES, NODES, SCHEDULES, Object, ServedSchedule

SCHEDULE = f"{SCHEDULES}/gpus"
SECRET = "/api/v1/namespaces/gpuvirt/secrets/vcenter"  # noqa: S105  a path
CONTROLLER_LEASES = "/apis/coordination.k8s.io/v1/namespaces/gpuvirt/leases"
POD = "/api/v1/namespaces/default/pods"
RENEWED_EVERY_S = 10.0
READY_AFTER_S = 3.0
LOST_AFTER_S = 40.0
GRACE_S = 2.0
TICK_S = 0.02
"""Of real time."""


class Type(StrEnum):
    """The vGPU types of the workers, as their nodes are labelled."""

    QUARTER = "v100-4q-4GB"
    WHOLE = "v100-16q-16GB"


SPEC: Object = {
    "timeZone": "Europe/Berlin",
    "hypervisor": {"vsphere": {"secretRef": {"name": "vcenter"}}},
    "phases": [
        {"name": "day", "start": "0 7 * * 1-5", "workers": {"matchLabels": {"vgpu.type": Type.QUARTER}}},
        {"name": "night", "start": "0 20 * * 1-5", "workers": {"matchLabels": {"vgpu.type": Type.WHOLE}}},
    ],
    "drain": {"timeout": "2m"},
}
PATIENT: Object = {**SPEC, "drain": {"timeout": "2h"}}
"""Where a drain must not be held: on a busy computer, a fast clock's two minutes are over before pods have ended."""


class Kubelet(msgspec.Struct, frozen=True):
    """One node's kubelet, by the time of its VM."""

    is_on: bool
    since_s: float
    renewed_s: float = -100.0


class RunningPod(msgspec.Struct, frozen=True):
    """A pod of a workload that replaces those that end."""

    type: Type
    node: str = ""
    """Empty while it is pending."""
    ends_s: float | None = None


class VmCluster(ServedSchedule):
    """The cluster. `tick` lets kubelets, pods and the scheduler act."""

    def __init__(self, vcenter: VSphere, credentials: HypervisorCredentials, clock: FastClock) -> None:
        super().__init__()
        self.vcenter, self.clock = vcenter, clock
        self.pods: dict[str, RunningPod] = {}
        self.violations: list[str] = []
        self.min_available = 0
        """How many pods of the workload the budget wants to run."""
        self.grace_s = GRACE_S
        """How long pods take to end."""
        self._numbers = iter(range(10**6))
        now_s = clock.monotonic_s()
        power = vcenter.state.power
        self.kubelets = {name: Kubelet(state == "poweredOn", now_s - 100.0) for name, state in sorted(power.items())}
        for number, (name, kubelet) in enumerate(self.kubelets.items()):
            last = number == len(self.kubelets) - 1
            self._put_node(name, Type.WHOLE if last else Type.QUARTER, number, is_ready=kubelet.is_on)
            self._put_pod(f"agent-{number}", {"nodeName": name}, "DaemonSet")
            self._create(Type.WHOLE if last else Type.QUARTER)
        self.put_secret(credentials)
        self.put_spec(SPEC)

    def put_secret(self, credentials: HypervisorCredentials) -> None:
        """Store the Secret of the schedule."""
        values = {name: getattr(credentials, name) for name in ("server", "ca", "user", "password")}
        self.put(SECRET, {"data": {key: b64encode(text.encode()).decode() for key, text in values.items()}})

    def put_spec(self, spec: Object) -> int:
        """Store another spec, and return its generation."""
        before = self.objects.get(SCHEDULE, {})
        generation = self.generation + 1
        self.put(SCHEDULE, {**before, "metadata": {"generation": generation}, "spec": spec})
        return generation

    @property
    def generation(self) -> int:
        """The generation of the schedule."""
        found = self.objects.get(SCHEDULE, {}).get("metadata", {})
        assert isinstance(found, dict)
        return int(found.get("generation", 0))

    def status(self) -> Object:
        """Return the status of the schedule."""
        found = self.objects[SCHEDULE].get("status", {})
        assert isinstance(found, dict)
        return found

    def conditions(self) -> dict[str, tuple[str, str]]:
        """Return the status and reason of each condition."""
        found = self.status().get("conditions", [])
        assert isinstance(found, list)
        return {condition["type"]: (condition["status"], condition["reason"]) for condition in found}

    def has_reached(self, phase: str) -> bool:
        """Return whether the phase is reached, by the spec that there is."""
        status = self.status()
        reached = status.get("phase"), status.get("observedGeneration"), status.get("transition")
        return reached == (phase, self.generation, None)

    def cordons(self) -> dict[str, tuple[bool, str]]:
        """Return of each node whether it is cordoned, and whose cordon it is."""
        return {name: _cordon(self.objects[f"{NODES}/{name}"]) for name in self.kubelets}

    def taints(self, name: str) -> list[object]:
        """Return the keys of a node's taints."""
        spec = self.objects[f"{NODES}/{name}"]["spec"]
        assert isinstance(spec, dict)
        return [taint["key"] for taint in spec.get("taints") or []]

    def running(self, node: str) -> list[str]:
        """Return the pods of the workload on a node."""
        return [name for name, pod in self.pods.items() if pod.node == node]

    @override
    def answer(self, call: Call) -> Reply:
        """Answer one request. Pods are deleted by evictions alone."""
        if call.method == "POST" and call.path == CONTROLLER_LEASES:
            lease: Object = json.loads(call.body)
            metadata = lease["metadata"]
            assert isinstance(metadata, dict)
            self.put(f"{CONTROLLER_LEASES}/{metadata['name']}", lease)
            return 201, self.objects[f"{CONTROLLER_LEASES}/{metadata['name']}"]
        if call.method == "DELETE":
            self.violations.append(f"against a budget: {call.method} {call.path}")
        return super().answer(call)

    async def live(self) -> None:
        """Let the cluster live until cancelled."""
        while True:
            self.tick()
            await REAL.sleep(TICK_S)

    def tick(self) -> None:
        """Let kubelets, pods and the scheduler act by the power of the VMs."""
        now_s = self.clock.monotonic_s()
        for name, state in self.vcenter.state.power.items():
            self._live_kubelet(name, now_s, is_on=state == "poweredOn")
        for name, pod in list(self.pods.items()):
            if pod.ends_s is not None and now_s >= pod.ends_s and self.kubelets[pod.node].is_on:
                del self.pods[name], self.objects[f"{POD}/{name}"]
        for name, pod in list(self.pods.items()):
            if not pod.node:
                self._bind(name, pod)

    def _live_kubelet(self, name: str, now_s: float, *, is_on: bool) -> None:
        kubelet = self.kubelets[name]
        if kubelet.is_on != is_on:
            if kubelet.is_on and self.running(name):
                self.violations.append(f"suspended with pods: {name}: {self.running(name)}")
            stood_s = now_s - kubelet.since_s if is_on else 0.0  # a kubelet's clock stands while its VM is suspended
            kubelet = Kubelet(is_on, now_s, kubelet.renewed_s + stood_s)
        if is_on and now_s - kubelet.renewed_s >= RENEWED_EVERY_S:
            kubelet = replace(kubelet, renewed_s=now_s)
            self.put(f"{LEASES}/{name}", {"spec": {"renewTime": f"{self.clock.now():%Y-%m-%dT%H:%M:%S.%fZ}"}})
        self.kubelets[name] = kubelet
        after_s = now_s - kubelet.since_s
        if is_on and after_s >= READY_AFTER_S and not self.is_ready(name):
            self._set_ready(name, is_ready=True)
        if not is_on and after_s >= LOST_AFTER_S and self.is_ready(name):
            self._set_ready(name, is_ready=False)

    def _bind(self, name: str, pod: RunningPod) -> None:
        for node in self.kubelets:
            content = self.objects[f"{NODES}/{node}"]
            is_open = self.is_ready(node) and not _cordon(content)[0]
            if is_open and _type(content) == pod.type and not self.running(node):
                if not self.kubelets[node].is_on:
                    self.violations.append(f"bound to a VM that is off: {name} to {node}")
                self.pods[name] = replace(pod, node=node)
                self._put_pod(name, {"nodeName": node}, "ReplicaSet")
                return

    def _create(self, kind: Type) -> None:
        name = f"train-{next(self._numbers)}"
        self.pods[name] = RunningPod(kind)
        self._put_pod(name, {}, "ReplicaSet")

    @override
    def _evict(self, call: Call) -> Reply:
        name = call.path.split("/")[-2]
        found = self.pods.get(name)
        uid = json.loads(call.body)["deleteOptions"]["preconditions"]["uid"]
        if found is None or uid != f"uid-{name}":
            return NOT_FOUND
        healthy = sum(bool(pod.node) and pod.ends_s is None for pod in self.pods.values())
        if found.ends_s is None and healthy <= self.min_available:
            return BLOCKED
        if found.ends_s is None:
            self.pods[name] = replace(found, ends_s=self.clock.monotonic_s() + self.grace_s)
            self._put_pod(name, {"nodeName": found.node}, "ReplicaSet", deletionTimestamp="2026-01-05T12:00:00Z")
            self._create(found.type)
        return 201, {"kind": "Status", "status": "Success"}

    def _put_pod(self, name: str, spec: Object, owner: str, **metadata: str) -> None:
        owners = [{"kind": owner, "name": "owner", "controller": True}]
        self.put(
            f"{POD}/{name}",
            {"metadata": {"namespace": "default", "ownerReferences": owners, **metadata}, "spec": spec},
        )

    def _put_node(self, name: str, kind: Type, number: int, *, is_ready: bool) -> None:
        self.put(
            f"{NODES}/{name}",
            {
                "metadata": {"labels": {"vgpu.type": kind}},
                "spec": {},
                "status": {
                    "conditions": [{"type": "Ready", "status": "True" if is_ready else "Unknown"}],
                    "nodeInfo": {"systemUUID": f"4217aaaa-0000-0000-0000-{number:012}"},
                },
            },
        )

    def is_ready(self, name: str) -> bool:
        status = self.objects[f"{NODES}/{name}"]["status"]
        assert isinstance(status, dict)
        return bool(status["conditions"][0]["status"] == "True")

    def _set_ready(self, name: str, *, is_ready: bool) -> None:
        node = self.objects[f"{NODES}/{name}"]
        status = node["status"]
        assert isinstance(status, dict)
        conditions = [{"type": "Ready", "status": "True" if is_ready else "Unknown"}]
        self.put(f"{NODES}/{name}", {**node, "status": {**status, "conditions": conditions}})


def _cordon(node: Object) -> tuple[bool, str]:
    spec, metadata = node["spec"], node["metadata"]
    assert isinstance(spec, dict)
    assert isinstance(metadata, dict)
    return bool(spec.get("unschedulable")), metadata["labels"].get("gpuvirt.io/cordoned-by", "")


def _type(node: Object) -> str:
    metadata = node["metadata"]
    assert isinstance(metadata, dict)
    return str(metadata["labels"]["vgpu.type"])
