"""Pseudonyms for the nodes, pods and namespaces in a support archive: a name has the same pseudonym everywhere."""

import dataclasses
import re
from collections.abc import Iterable

from msgspec.structs import replace

from gpuvirt.facts.ids import PodUid
from gpuvirt.model.allocation.ledger import Consumer, Ledger
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.shares.demand import ContainerName
from gpuvirt.model.shares.node.records import PodRecord

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
        """Learn the names of the pods in a NodeView."""
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
