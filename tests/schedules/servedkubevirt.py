"""VirtualMachines at an API server, and a stand-in for virt-api and virt-controller, which acts with delays.

Source: KubeVirt's pkg/virt-controller/watch/vm/vm.go (`syncRunStrategy`), pkg/virt-api/rest/lifecycle.go and the
admitters of pkg/virt-api/webhooks: what they refuse is refused here.
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec

from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.kinds.kubevirt import Vm
from gpuvirt.model.workers.hypervisor import VmKey
from gpuvirt_schedules.controller.kubevirt.connection import KubeVirtVms
from tests.kube.scriptedapi import CONFLICT, NOT_FOUND, Call, Reply, scripted
from tests.web.certificates import Pair

Object = dict[str, object]
NAMESPACE = "workers"
VMS = f"/apis/kubevirt.io/v1/namespaces/{NAMESPACE}/virtualmachines"
VMIS = f"/apis/kubevirt.io/v1/namespaces/{NAMESPACE}/virtualmachineinstances"
SUBRESOURCES = f"/apis/subresources.kubevirt.io/v1/namespaces/{NAMESPACE}/virtualmachines"
SAVED = "gpuvirt.io/saved-run-strategy"
LAG_S, SCHEDULED_S, RUNNING_S, GUEST_S = 2.0, 3.0, 10.0, 20.0
INVALID: Reply = 422, {"kind": "Status", "message": "admission webhook denied the request", "code": 422}
KEY = VmKey("uid-worker")


@dataclass(slots=True)
class Guest:
    """One VM with its VMI."""

    name: str
    uid: str
    spec: Object
    gpu: int = 4
    ignores_shutdown: bool = False
    annotations: dict[str, str] = field(default_factory=dict)
    version: int = 1
    requests: list[Object] = field(default_factory=list)
    followed: str = ""
    """The strategy in the status, which virt-controller has followed last."""
    changed_s: float = -1e9
    vmi: Object | None = None
    """The VMI's uid, and when it began and is deleted."""
    grace_s: float = 180.0
    phase: str = ""
    began_s: float = 0.0
    deleted_s: float | None = None
    owners: list[Object] = field(default_factory=list)
    is_orphan: bool = False
    """Whether its VMI is no VirtualMachine's."""
    address: str = ""
    boots: int = 0
    power_cuts: int = 0
    """How often KubeVirt has taken the power of a guest that had not ended."""

    @property
    def strategy(self) -> str:
        if "running" in self.spec:
            return "Always" if self.spec["running"] else "Halted"
        return str(self.spec["runStrategy"])

    @property
    def has_gpu(self) -> bool:
        return self.phase in {"Scheduled", "Running"}


class ServedKubeVirt:
    """The VMs of a namespace on one GPU."""

    def __init__(self, capacity: int = 16) -> None:
        self.guests: dict[str, Guest] = {}
        self.capacity = capacity
        self.now_s = 100.0
        self.writes: list[str] = []
        self._numbers = count(1)
        self._versions = count(10)

    def add(self, name: str, strategy: str, *, gpu: int = 4, runs: bool = True, grace_s: int = 180) -> Guest:
        """Add a VM, with a VMI that runs."""
        template: Object = {
            "spec": {
                "terminationGracePeriodSeconds": grace_s,
                "domain": {"devices": {"gpus": [{"name": "gpu", "deviceName": f"nvidia.com/A10-{gpu}Q"}]}},
            }
        }
        chosen: Object = {"running": runs} if strategy == "running" else {"runStrategy": strategy}
        guest = Guest(name, f"uid-{name}", {**chosen, "template": template}, gpu, version=next(self._versions))
        guest.followed, guest.grace_s = guest.strategy, grace_s
        guest.address = f"10.0.0.{len(self.guests) + 1}"
        self.guests[name] = guest
        if runs:
            self._begin(guest)
            guest.phase = "Running"
        return guest

    def answer(self, call: Call) -> Reply:
        """Answer one request."""
        if call.method == "GET":
            items = [self._vm(guest) for guest in self.guests.values()]
            if call.path == VMIS:
                items = [self._vmi(guest) for guest in self.guests.values() if guest.vmi is not None]
            return 200, {"metadata": {"resourceVersion": "1"}, "items": items}
        self.writes.append(f"{call.method} {call.path}")
        parts = call.path.split("/")
        name = next((part for part in parts if part in self.guests), None)
        if name is None:
            return NOT_FOUND
        guest, sent = self.guests[name], json.loads(call.body)
        if call.path == f"{SUBRESOURCES}/{name}/stop":
            return self._stop(guest, sent)
        if call.path not in {f"{VMS}/{name}", f"{VMS}/{name}/status"}:
            return INVALID
        if isinstance(sent, list):
            return self._json_patch(guest, sent)
        return self._merge(guest, sent, is_status=call.path.endswith("/status"))

    def touch(self, guest: Guest) -> None:
        """Give a VM a new version: it was changed."""
        guest.version, guest.changed_s = next(self._versions), self.now_s

    def pass_time(self, now_s: float) -> None:
        """Do what virt-controller, virt-handler and the guests do until then."""
        while self.now_s < now_s:
            self.now_s = min(now_s, self.now_s + 1.0)
            for guest in self.guests.values():
                self._run(guest)
                if self.now_s >= guest.changed_s + LAG_S:
                    self._follow(guest)

    def _merge(self, guest: Guest, sent: Object, *, is_status: bool) -> Reply:
        metadata, spec, status = (sent.get(key, {}) for key in ("metadata", "spec", "status"))
        assert isinstance(metadata, dict)
        assert isinstance(spec, dict)
        assert isinstance(status, dict)
        if metadata.get("resourceVersion") != str(guest.version):
            return CONFLICT
        if is_status:
            guest.requests = list(status["stateChangeRequests"])
        else:
            merged = {key: value for key, value in {**guest.spec, **spec}.items() if value is not None}
            if ("running" in merged) is ("runStrategy" in merged):
                return INVALID  # they are mutually exclusive
            guest.spec = merged
            kept = {**guest.annotations, **metadata.get("annotations", {})}
            guest.annotations = {key: value for key, value in kept.items() if value is not None}
        self.touch(guest)
        return 200, self._vm(guest)

    def _json_patch(self, guest: Guest, operations: list[Object]) -> Reply:
        devices = guest.spec["template"]["spec"]["domain"]["devices"]  # type: ignore[index]
        current: Object = {
            "/metadata/uid": guest.uid,
            "/spec/template/spec/domain/devices/gpus/0/deviceName": devices["gpus"][0]["deviceName"],
        }
        for operation in operations:
            path, value = str(operation["path"]), operation["value"]
            if path == "/metadata/resourceVersion" and value != str(guest.version):
                return CONFLICT
            if operation["op"] == "test" and current[path] != value:
                return INVALID
        devices["gpus"][0]["deviceName"] = operations[-1]["value"]
        self.touch(guest)
        return 200, self._vm(guest)

    def _stop(self, guest: Guest, sent: Object) -> Reply:
        grace_s = sent.get("gracePeriod")
        assert isinstance(grace_s, int)
        if guest.phase in {"", "Succeeded"} or (guest.strategy == "Halted" and grace_s >= guest.grace_s):
            return CONFLICT
        guest.grace_s = grace_s
        if guest.strategy in {"Always", "Once"}:
            guest.spec["runStrategy"] = "Halted"
        else:
            assert guest.vmi is not None
            guest.requests = [{"action": "Stop", "uid": guest.vmi["uid"]}]
        self.touch(guest)
        return 202, {}

    def _follow(self, guest: Guest) -> None:
        """Do what virt-controller does at each sync."""
        asked = [request["action"] for request in guest.requests]
        is_new = guest.followed != guest.strategy
        if guest.vmi is not None:
            stops = any(request.get("uid") == guest.vmi["uid"] for request in guest.requests)
            ended = guest.phase == "Succeeded"
            deletes = stops or guest.strategy == "Halted"
            deletes = deletes or (ended and guest.strategy in {"Always", "RerunOnFailure"})
            if deletes and guest.deleted_s is None:
                guest.deleted_s = self.now_s
        elif guest.strategy == "Halted":
            pass
        elif (
            guest.strategy in {"Always", "Once"} or "Start" in asked or (is_new and guest.strategy == "RerunOnFailure")
        ):
            self._begin(guest)
        left = [request for request in guest.requests if not _is_done(request, guest)]
        if left != guest.requests or is_new:
            guest.requests, guest.followed = left, guest.strategy
            guest.version = next(self._versions)

    def _begin(self, guest: Guest) -> None:
        assert guest.vmi is None, "a VM has one VMI"
        guest.vmi = {"uid": f"{guest.uid}-{next(self._numbers)}"}
        guest.phase, guest.began_s, guest.deleted_s = "Pending", self.now_s, None
        guest.boots += 1
        spec = guest.spec["template"]["spec"]  # type: ignore[index]
        guest.grace_s = float(spec["terminationGracePeriodSeconds"])

    def _run(self, guest: Guest) -> None:
        if guest.vmi is None:
            return
        age_s = self.now_s - guest.began_s
        used = sum(other.gpu for other in self.guests.values() if other.has_gpu)
        if guest.deleted_s is not None:
            left_s = self.now_s - guest.deleted_s
            ends = not guest.ignores_shutdown and left_s >= GUEST_S
            if not guest.has_gpu or guest.phase == "Succeeded" or ends or left_s >= guest.grace_s:
                guest.power_cuts += guest.has_gpu and not ends
                guest.vmi, guest.phase, guest.deleted_s = None, "", None
        elif guest.phase == "Pending" and age_s >= SCHEDULED_S and used + guest.gpu <= self.capacity:
            guest.phase = "Scheduled"
        elif guest.phase == "Scheduled" and age_s >= RUNNING_S:
            guest.phase = "Running"

    def _vm(self, guest: Guest) -> Object:
        metadata: Object = {
            "name": guest.name,
            "namespace": NAMESPACE,
            "uid": guest.uid,
            "resourceVersion": str(guest.version),
            "annotations": dict(guest.annotations) or None,
            "ownerReferences": guest.owners,
        }
        status: Object = {"stateChangeRequests": guest.requests or None, "runStrategy": guest.followed}
        states = {"": "Stopped", "Running": "Running"}
        status["printableStatus"] = states.get(guest.phase, "Starting")
        return {"metadata": metadata, "spec": guest.spec, "status": status}

    def _vmi(self, guest: Guest) -> Object:
        assert guest.vmi is not None
        owner = {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "uid": guest.uid, "controller": True}
        owners = [] if guest.is_orphan else [owner]
        metadata: Object = {"name": guest.name, "namespace": NAMESPACE, "ownerReferences": owners, **guest.vmi}
        if guest.deleted_s is not None:
            metadata["deletionTimestamp"] = "2026-01-05T19:00:00Z"
        template = guest.spec["template"]
        assert isinstance(template, dict)
        spec = {**template["spec"], "terminationGracePeriodSeconds": guest.grace_s.__int__()}
        live = [{"type": "LiveMigratable", "status": "False", "reason": "HostDeviceNotLiveMigratable"}]
        status: Object = {"phase": guest.phase, "conditions": live}
        if guest.phase == "Running":
            status["interfaces"] = [{"ipAddress": guest.address, "ipAddresses": None}]
        return {"metadata": metadata, "spec": spec, "status": status}


def _is_done(request: Object, guest: Guest) -> bool:
    """Return whether virt-controller removes a request (`trimDoneVMChangeRequests`)."""
    if request["action"] == "Stop":
        return guest.vmi is None or guest.vmi["uid"] != request.get("uid")
    return guest.vmi is not None and guest.deleted_s is None and guest.phase != "Succeeded"


@asynccontextmanager
async def connected(answer: Callable[[Call], Reply], server: Pair, ca: Path) -> AsyncIterator[KubeVirtVms]:
    async with scripted(answer, server, ca) as api:
        client = Client(Credentials("127.0.0.1", api.port, "gpuvirt", ca=ca, token=b"x"))
        yield KubeVirtVms(client, NAMESPACE)
        client.close()


def convert_vm(strategy: str, devices: Mapping[str, object]) -> Vm:
    """Return a VirtualMachine with these devices, which does not run."""
    content = {
        "metadata": {"name": "worker", "uid": "uid-worker"},
        "spec": {"runStrategy": strategy, "template": {"spec": {"domain": {"devices": devices}}}},
        "status": {"runStrategy": strategy},
    }
    return msgspec.convert(content, Vm)
