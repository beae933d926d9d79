"""A simulated kubelet: its allocations, and its two accounts of them, each of which may be late or lost."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path

import msgspec

from gpuvirt.agent.kubelet.podresources import Devices, PodResourcesUnknownError
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.allocation.allocations import Consumers
from gpuvirt.model.allocation.ledger import Consumer
from gpuvirt.model.shares.node.records import is_unit_id
from gpuvirt.paths import KubeletPaths
from tests.explore.agenda import Option

TAKEN_WITHIN_S = 5.0
"""The time that a slow kubelet takes to record an answer; its connection to the plugin is open."""

PID = 1000
Key = tuple[ResourceName, DeviceId]


def _nothing() -> None:
    return


@dataclass(eq=False)
class Pod:
    """A pod with devices."""

    name: str
    uid: str
    keys: tuple[Key, ...]
    containers: tuple[str, ...] = ("main",)
    """Its containers that have the devices, in the order in which the kubelet allocates them: an init container's
    devices go to the others."""
    nodes: tuple[str, ...] = ()
    """The groups of its container's nodes under `/dev`."""
    groups: frozenset[int] = frozenset()
    functions: frozenset[str] = frozenset()
    """Its devices of another plugin, whose ids are no addresses."""
    by_other: bool = False
    """Whether another plugin has given the devices."""
    ask: Callable[[], None] = field(default=_nothing)
    """Asks the plugin for the next container."""
    asked: Callable[[], None] | None = None
    """Calls the plugin's Allocate, until it is answered."""
    answered: bool = False
    """The plugin has allocated the devices to the pod."""
    fails: bool = False
    """Whether the kubelet refuses the pod for another reason, after all its devices were allocated."""
    taken_within_s: float = TAKEN_WITHIN_S
    waits_for_other_s: float = 0.0
    """How long the kubelet waits for another plugin's answer for the same container, before it records that."""
    stops_writes: bool = False
    """Whether the kubelet's disk stands still while it waits for the other plugin."""
    taken: bool = False
    """The plugin's answer is in the kubelet's memory, from which it writes its record at each list."""
    overtaken: bool = False
    """A list has overtaken the answer; the next one can't."""
    waits: bool = False
    """Whether the kubelet waits for the answer for a further container."""
    answered_s: float = 0.0
    known: bool = False
    """The kubelet has recorded the plugin's answers for all containers."""
    recorded: int = 0
    """For how many containers it has recorded an answer."""
    has_folder: bool = False
    """Whether the kubelet has made the pod's folder."""
    listed: bool = False
    """The kubelet's API lists the pod."""
    forgotten: bool = False
    """The kubelet has started without a checkpoint, and does not know the pod's devices any more."""
    ended: bool = False
    answer: bytes | None = None
    """The plugin's answer to Allocate, where it is recorded; the same for all containers."""
    may_start: bool = False
    """Whether the kubelet has yet to call PreStartContainer for its container with units."""
    vgpus: frozenset[str] = frozenset()
    """The vGPUs that were created for the pod."""
    started: bool = False
    """Whether its container has started with these vGPUs."""
    rebooted: bool = False
    """Whether the host has booted since the answer, so that its groups may be other pods'."""
    readmits: bool = False
    """Whether a kubelet that has started has yet to admit the pod again."""
    is_claimer: bool = False
    """Whether its GPU is a claim's (DRA): `ClaimKubelet` asks for it, and keeps the pod until it is given back."""
    deleted: bool = False
    """The API server has deleted the pod by force, so that the kubelet has freed its devices; its container runs on."""

    @property
    def is_sharer(self) -> bool:
        """Whether the pod has units of shared GPUs."""
        return any(is_unit_id(device) for _, device in self.keys)

    @property
    def taken_by_s(self) -> float:
        """Return the latest time at which the kubelet records the plugin's answer, or has it in its memory."""
        is_due = self.answered and not self.known and (self.asked is not None or not self.waits)
        if not self.waits_for_other_s:
            return self.answered_s + self.taken_within_s if is_due else inf
        return self.answered_s + (self.waits_for_other_s if self.taken else self.taken_within_s) if is_due else inf

    @property
    def opened_groups(self) -> frozenset[int]:
        """Return the groups that its container has; after a reboot none before the container starts."""
        return frozenset() if self.rebooted and not self.started else self.groups

    @property
    def has_devices(self) -> bool:
        """Whether the pod has its devices; one that was deleted before its start never gets its vGPUs."""
        never_starts = self.deleted and bool(self.vgpus) and not self.started
        return self.answered and not self.ended and not never_starts


class Kubelet(msgspec.Struct):
    """The kubelet of one node."""

    paths: KubeletPaths
    durable: Callable[[Path], None]
    """Makes the present content of a file or folder durable."""
    now: Callable[[], float]
    """Returns the host's monotonic time."""
    up: bool = True
    unreadable: bool = False
    """Whether the accounts of a running kubelet can't be read."""
    reaches_api_server: bool = True
    has_pods: bool = True
    """Whether it has its pods from the API server; without them it lists none and starts none."""
    is_silent: bool = False
    """Whether GetAllocatableResources fails while List answers."""
    pods: dict[str, Pod] = msgspec.field(default_factory=dict)
    lists: dict[ResourceName, Mapping[DeviceId, bool]] = msgspec.field(default_factory=dict)
    """The devices of each resource and their health, as plugins have listed them."""
    before_start: Callable[[], object] = lambda: None
    """The agent's action at PreStartContainer, before a container with its devices starts: it reads the record."""
    _writes: int = 0

    def __post_init__(self) -> None:
        self.paths.registration_socket.touch()
        self.paths.pod_resources_socket.touch()
        self.write()

    def pids(self) -> tuple[int, ...]:
        """Return the pid of the kubelet while it runs."""
        return (PID,) if self.up else ()

    def free(self) -> Iterator[Key]:
        """Yield the devices with which the kubelet could admit a pod now."""
        if not self.up:
            return
        taken = {
            key for pod in self.pods.values() if not (pod.ended or pod.forgotten or pod.deleted) for key in pod.keys
        }
        for resource, devices in self.lists.items():
            for device, healthy in devices.items():
                if healthy and (resource, device) not in taken:
                    yield resource, device

    def begin(self, name: str, keys: tuple[Key, ...], *containers: str) -> Pod:
        """Begin to admit a pod. With `containers` its folder is made only after its admission, as Kubernetes does."""
        pod = self.pods[name] = Pod(name, f"uid-{name}", keys, containers or ("main",))
        if not containers:
            self._make_folder(pod)
        return pod

    def runs(self, name: str) -> bool:
        """Return whether a pod has its devices, and has not ended."""
        pod = self.pods.get(name)
        return pod is not None and pod.known and not pod.ended

    @property
    def is_admitting(self) -> bool:
        """Whether a pod's admission is not complete: the kubelet admits one pod at a time."""
        return any(not (pod.known or pod.ended or pod.is_claimer) for pod in self.pods.values())

    @property
    def is_waiting(self) -> bool:
        """Whether the kubelet waits for another plugin, with an answer of the agent."""
        return any(pod.waits_for_other_s and not (pod.known or pod.ended) for pod in self.pods.values())

    def admit_by_other(self, name: str, key: Key, functions: frozenset[str], groups: frozenset[int]) -> Pod:
        """Admit a pod whose device another plugin gives at once."""
        pod = self.begin(name, (key,))
        pod.answered, pod.by_other, pod.functions, pod.groups = True, True, functions, groups
        self.take_answer(pod)
        pod.listed = self.up
        return pod

    def reject(self, pod: Pod) -> None:
        """Reject a pod whose Allocate was refused, if it waits for the answer."""
        if self.awaits(pod):
            del self.pods[pod.name]
            self._forget_folder(pod)

    def awaits(self, pod: Pod) -> bool:
        """Return whether the kubelet still takes the answer for a pod: it has not ended since it asked."""
        return self.pods.get(pod.name) is pod

    def take_answer(self, pod: Pod) -> None:
        """Record the devices of a pod's next container."""
        pod.recorded += 1
        pod.taken = False
        pod.known = pod.recorded >= len(pod.containers)
        self.write()
        if not pod.known:
            pod.waits = True
            pod.ask()
            return
        if not pod.by_other:
            self.before_start()
        if pod.fails:
            self.end(pod)

    def end(self, pod: Pod) -> None:
        """End a pod's containers; the checkpoint has the pod until the next write."""
        pod.ended, pod.listed = True, False
        self._forget_folder(pod)

    def take_lists(self, lists: Mapping[ResourceName, Mapping[DeviceId, bool]]) -> None:
        """Store the device lists of a plugin, and write the checkpoint.

        Answers come by the same connection before a list. The kubelet handles both at once, so that one list may
        overtake an answer.
        """
        self.lists = dict(lists)
        for pod in self.pods.values():
            if pod.answered and not (pod.known or pod.waits):
                pod.taken, pod.overtaken = pod.taken or pod.overtaken, True
        self.write()

    def lose_plugins(self) -> None:
        """Break the plugins' connections: their devices count as unhealthy, and requests fail."""
        self.lists = {}
        for pod in [pod for pod in self.pods.values() if pod.asked is not None or (pod.waits and not pod.known)]:
            self.reject(pod)

    def stop(self) -> None:
        """Stop the kubelet: pods continue, and the API does not answer."""
        self.up = False
        self.lists = {}
        self.paths.pod_resources_socket.unlink(missing_ok=True)
        for pod in self.pods.values():
            pod.listed = False

    def start(self) -> None:
        """Start the kubelet again: it has its checkpoint, and gets its pods from the API server later."""
        self.up, self.has_pods = True, self.reaches_api_server
        self.paths.pod_resources_socket.touch()
        self.paths.registration_socket.touch()
        self._stamp(self.paths.registration_socket)
        for pod in [pod for pod in self.pods.values() if not (pod.known or pod.taken or pod.is_claimer)]:
            self.reject(pod)  # a kubelet that has ended starts no container with an answer that it has not recorded
        for pod in self.pods.values():
            pod.readmits = not pod.is_claimer and (bool(pod.vgpus) or (pod.rebooted and not pod.started))
        if not self.paths.checkpoint.exists():
            for pod in self.pods.values():
                pod.forgotten = not pod.is_claimer

    def write(self) -> None:
        """Write the checkpoint, without the pods that have ended."""
        if any(pod.stops_writes and pod.answered and not pod.known for pod in self.pods.values()):
            return
        for pod in [pod for pod in self.pods.values() if pod.ended and not pod.is_claimer]:
            del self.pods[pod.name]
        entries = [
            {
                "PodUID": pod.uid,
                "ContainerName": container,
                "ResourceName": resource,
                "DeviceIDs": {"0": [device for other, device in pod.keys if other == resource]},
                "AllocResp": pod.answer,
            }
            for pod in self.pods.values()
            if not (pod.forgotten or pod.deleted or pod.is_claimer)
            for container in pod.containers[: pod.recorded + pod.taken]
            for resource in dict.fromkeys(resource for resource, _ in pod.keys)
        ]
        data = {
            "PodDeviceEntries": entries,
            "RegisteredDevices": {device_list: sorted(two) for device_list, two in self.lists.items()},
        }
        beside = self.paths.checkpoint.with_name(".checkpoint")
        beside.write_bytes(msgspec.json.encode({"Data": data, "Checksum": 0}))
        beside.replace(self.paths.checkpoint)
        self.durable(self.paths.checkpoint)
        self.durable(self.paths.device_plugins)
        self._stamp(self.paths.checkpoint)

    def possible_events(self) -> Iterator[Option]:
        """Yield the kubelet's own events."""
        for pod in self.pods.values():
            if pod.asked is not None:
                yield Option(f"the request for {pod.name} reaches the agent", pod.asked, ("request", pod.name))
            if pod.answered and not (pod.waits or pod.known or pod.ended):
                is_other_due = self.now() >= pod.answered_s + pod.waits_for_other_s
                if pod.waits_for_other_s and not pod.taken:
                    take = partial(setattr, pod, "taken", True)
                    yield Option(f"the kubelet takes the answer for {pod.name}", take, ("answer", pod.name))
                elif is_other_due:
                    record = partial(self.take_answer, pod)
                    yield Option(f"the kubelet records {pod.name}", record, ("answer", pod.name))
            if pod.known and self.up and self.has_pods and not (pod.has_folder or pod.ended):
                make = partial(self._make_folder, pod)
                yield Option(f"the kubelet makes the folder of {pod.name}", make, ("folder", pod.name))
            is_reported = self.up and self.has_pods and not pod.functions
            if pod.known and is_reported and not (pod.listed or pod.ended or pod.forgotten):
                yield Option(f"the kubelet's API lists {pod.name}", partial(_list, pod), ("lists", pod.name))

    # --- the answers of its API

    def account(self) -> Consumers:
        """Return the devices of pods as the API lists them."""
        self._verify_up()
        return {
            key: Consumer(namespace="default", pod=pod.name, container="main")
            for pod in self.pods.values()
            if pod.listed and not (pod.forgotten or pod.deleted)
            for key in pod.keys
        }

    def allocatable(self) -> Devices:
        """Return the devices that the kubelet counts as allocatable."""
        self._verify_up()
        if self.is_silent:
            raise PodResourcesUnknownError("GetAllocatableResources: RESOURCE_EXHAUSTED")
        return frozenset(
            (resource, device)
            for resource, devices in self.lists.items()
            for device, healthy in devices.items()
            if healthy
        )

    def _verify_up(self) -> None:
        if not self.up or self.unreadable:
            raise PodResourcesUnknownError("the kubelet does not answer")

    # --- its files

    def _make_folder(self, pod: Pod) -> None:
        pod.has_folder = True
        (self.paths.pods / pod.uid).mkdir(exist_ok=True)
        self._touch_pods()

    def _forget_folder(self, pod: Pod) -> None:
        folder = self.paths.pods / pod.uid
        if folder.exists():
            folder.rmdir()
            self._touch_pods()

    def _touch_pods(self) -> None:
        self._stamp(self.paths.pods)

    def _stamp(self, path: "os.PathLike[str]") -> None:
        """Set a modification time that is later than all before it, and the same in each run."""
        self._writes += 1
        os.utime(path, ns=(self._writes, self._writes))


def _list(pod: Pod) -> None:
    pod.listed = True
