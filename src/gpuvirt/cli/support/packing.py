"""The state that the sections of a support archive share: the request, unreadable files, and pseudonyms."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from errno import ENOENT, ENOTDIR, errorcode
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuvirt import archive
from gpuvirt.archive import Entry, LeftOut, NotRead
from gpuvirt.clock import Clock
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import PodUid
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.model.allocation.ledger import Consumer, Ledger
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.naming import TypeNames
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.shares.demand import ContainerName
from gpuvirt.model.shares.node.records import PodRecord
from gpuvirt.paths import HostRoots, KubeletPaths
from gpuvirt.plain import Plain

_POD = re.compile(r"\bpod (?P<pod>[-A-Za-z0-9_.]+(?:/[-A-Za-z0-9_.]+)?)")
"""How gpuvirt's messages name a pod: `pod default/vm-a`, or by its UID."""
_PSEUDONYM = re.compile(r"(?:node|namespace|pod|uid|container)-[0-9]+")


class Pseudonyms:
    """The pseudonym of each name; a new name gets the next number."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self.node = "node-1"
        self._nodes = {name: self.node for node in nodes for name in (node, node.partition(".")[0])}
        self._namespaces: dict[str, str] = {}
        self._containers: dict[str, str] = {}
        self._pods: dict[tuple[str, str], int] = {}
        """Numbers of pods, by namespace and name."""
        self._uids: dict[str, int] = {}
        self._count = 0

    def learn(self, consumers: Iterable[Consumer]) -> None:
        """Learn the names of pods, to find them in texts; consumers with a UID and a name come first."""
        for consumer in sorted(consumers, key=lambda known: (known.pod_uid is None or known.pod is None, known.text)):
            self.consumer(consumer)

    def learn_view(self, view: NodeView) -> None:
        """Learn the names of the node and the pods in a NodeView."""
        if view.agent is not None and view.agent.node is not None:
            self._nodes |= dict.fromkeys((view.agent.node, view.agent.node.partition(".")[0]), self.node)
        gpus = (*view.gpus, *view.functions)
        users = [user for gpu in gpus for user in gpu.users]
        users += [user for gpu in gpus for vgpu in gpu.vgpus for user in vgpu.users]
        users += [
            device.allocated_to for resource in view.resources for device in resource.devices if device.allocated_to
        ]
        for text in sorted(users):
            _POD.sub(self._match, text)

    def consumer(self, consumer: Consumer) -> Consumer:
        """Return a consumer with its names replaced by pseudonyms."""
        number = self._number(consumer.pod_uid, (consumer.namespace or "", consumer.pod) if consumer.pod else None)
        return dataclasses.replace(
            consumer,
            pod_uid=PodUid(f"uid-{number}") if consumer.pod_uid is not None else None,
            namespace=self.namespace(consumer.namespace) if consumer.namespace is not None else None,
            pod=f"pod-{number}" if consumer.pod is not None else None,
            container=self.container(consumer.container) if consumer.container is not None else None,
        )

    def ledger(self, ledger: Ledger) -> Ledger:
        """Return a ledger with pseudonyms; it still shows which devices were allocated together."""
        allocations: dict[str, str] = {}
        entries = tuple(
            replace(
                entry,
                consumer=self.consumer(entry.consumer) if entry.consumer is not None else None,
                allocation=allocations.setdefault(entry.allocation, f"allocation-{len(allocations) + 1}"),
            )
            for entry in ledger.entries
        )
        return replace(ledger, entries=entries)

    def pod_record(self, uid: PodUid, pod: PodRecord) -> tuple[PodUid, PodRecord]:
        """Return the UID and the shares of a pod with pseudonyms."""
        number = self._number(uid, (pod.namespace, pod.name))
        containers = {ContainerName(self.container(name)): share for name, share in pod.containers.items()}
        return PodUid(f"uid-{number}"), PodRecord(self.namespace(pod.namespace), f"pod-{number}", containers)

    def namespace(self, name: str) -> str:
        """Return the pseudonym of a namespace."""
        return self._namespaces.setdefault(name, f"namespace-{len(self._namespaces) + 1}")

    def container(self, name: str) -> str:
        """Return the pseudonym of a container."""
        return self._containers.setdefault(name, f"container-{len(self._containers) + 1}")

    def uid(self, uid: str) -> str:
        """Return the pseudonym of a pod's UID."""
        return f"uid-{self._number(uid, None)}"

    def text(self, text: str, *, is_log: bool = False) -> str:
        """Return a text with pseudonyms for all learned names, and for the pods that gpuvirt's messages name.

        In a log, the names of namespaces are replaced too, and with them any word that is spelled the same.
        """
        text = _POD.sub(self._match, text)
        words = {uid: f"uid-{number}" for uid, number in self._uids.items()} | self._nodes
        for (namespace, pod), number in self._pods.items():
            words |= {f"{namespace}/{pod}": f"{self.namespace(namespace)}/pod-{number}", pod: f"pod-{number}"}
        if is_log:
            words |= {name: pseudonym for name, pseudonym in self._namespaces.items() if name not in words}
        words.pop("", None)
        longest_first = sorted((name for name in words if not _PSEUDONYM.fullmatch(name)), key=len, reverse=True)
        if not longest_first:
            return text
        known = re.compile(rf"(?<![-\w])(?:{'|'.join(map(re.escape, longest_first))})(?![-\w])")
        return known.sub(lambda match: words[match[0]], text)

    def _match(self, match: re.Match[str]) -> str:
        namespace, slash, pod = match["pod"].rpartition("/")
        if all(_PSEUDONYM.fullmatch(part) for part in (namespace, pod) if part):
            return match[0]
        if slash:
            return f"pod {self.namespace(namespace)}/pod-{self._number(None, (namespace, pod))}"
        return f"pod {self.uid(pod)}" if re.search(r"[0-9]", pod) and "-" in pod else match[0]

    def _number(self, uid: str | None, pod: tuple[str, str] | None) -> int:
        known = self._uids.get(uid) if uid is not None else None
        if known is None and pod is not None:
            known = self._pods.get(pod)
        if known is None:
            self._count += 1
            known = self._count
        if uid is not None:
            self._uids.setdefault(uid, known)
        if pod is not None:
            self._pods.setdefault(pod, known)
        return self._pods[pod] if pod is not None else known


WITH_NAMES = frozenset({"node", "users", "allocated_to", "subject", "message", "seen", "places", "fix"})
"""The fields of a NodeView that may contain names."""
WITHOUT_PSEUDONYM = frozenset({"vms"})
"""Fields with names that are derived from names of pods; they are removed where names are hidden."""

Collected = Mapping[str, Entry]


class ArchiveRequest(msgspec.Struct, frozen=True):
    """The request for a support archive."""

    kernel: Kernel
    roots: HostRoots
    kubelet: KubeletPaths
    ledgers: tuple[Path, ...]
    """The paths of an agent's ledger; the first existing one is packed."""
    settings: Settings
    ids: PciIds
    clock: Clock
    nodes: tuple[str, ...]
    """The names of the node in the cluster and on the host; empty where they are unknown."""
    config: Path | None = None
    logs: tuple[Path, ...] = ()
    hide_names: bool = False


class Packing(msgspec.Struct):
    """An archive that is being packed: the state that its sections share."""

    asked: ArchiveRequest
    at: datetime
    names: Pseudonyms | None
    ledger: Ledger
    types: TypeNames
    """The names of the host's vGPU types."""
    view: NodeView
    unread: list[NotRead] = msgspec.field(default_factory=list)
    left_out: list[LeftOut] = msgspec.field(default_factory=list)

    def content(self, path: Path, *, most: int = archive.MOST_FILE_BYTES) -> bytes | None:
        """Return a small file; None, with a note, where it can't be read or is too large."""
        try:
            with path.open("rb") as file:
                content = file.read(most + 1)
        except OSError as error:
            self.refused(path, error)
            return None
        if len(content) > most:
            self.left_out.append(LeftOut(str(path), f"it has more than {most >> 20} MiB"))
            return None
        return content

    def refused(self, path: Path, error: OSError) -> None:
        """Note that a file could not be read."""
        why = meaning(error.errno) if error.errno is not None else str(error)
        self.unread.append(NotRead(str(path), error.errno, why))

    def understood(self, path: Path, place: str, content: bytes, fit: Callable[[bytes], bytes]) -> Collected:
        """Return a file as `fit` converts it; one that can't be parsed may have names or secrets, and is left out."""
        try:
            return {place: fit(content)}
        except DamagedError as error:
            why = f"it can't be parsed, so it may have names or secrets: {error}"
            self.left_out.append(LeftOut(str(path), why))
            return {}

    def text(self, content: bytes, *, is_log: bool = False) -> bytes:
        """Return a text, with pseudonyms where names are hidden."""
        if self.names is None:
            return content
        return self.names.text(content.decode(errors="surrogateescape"), is_log=is_log).encode(errors="surrogateescape")

    def nameless(self, text: str) -> str:
        """Return a text of the manifest, with pseudonyms where names are hidden."""
        return text if self.names is None else self.names.text(text, is_log=True)

    def picture(self, view: NodeView) -> bytes:
        """Return a NodeView as `gpuvirt devices -o json` prints it."""
        value: Plain = msgspec.json.decode(msgspec.json.encode(view))
        if self.names is not None:
            value = self._without_names(value)
        return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"

    def _without_names(self, value: Plain, *, has_names: bool = False) -> Plain:
        match value:
            case str():
                return self.names.text(value) if has_names and self.names is not None else value
            case list():
                return [self._without_names(element, has_names=has_names) for element in value]
            case dict():
                kept = {key: element for key, element in value.items() if key not in WITHOUT_PSEUDONYM}
                return {
                    key: self._without_names(element, has_names=has_names or key in WITH_NAMES)
                    for key, element in kept.items()
                }
            case _:
                return value


def is_absent(path: Path) -> bool:
    """Return whether `path` does not exist; a path that may not be read counts as existing."""
    try:
        path.stat()
    except OSError as error:
        return error.errno in {ENOENT, ENOTDIR}
    return False


def meaning(number: int) -> str:
    """Return the name and the meaning of an errno."""
    return f"{errorcode.get(number, number)}: {os.strerror(number)}"
