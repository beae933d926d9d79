"""Which of our resources KubeVirt offers itself: those must not be offered twice.

An entry without `externalResourceProvider: true` has KubeVirt's own plugin offer whatever its selector finds, under
its own name. The same devices under two names would be given away twice, and of one name the kubelet hears whoever has
registered last. So it is not the name alone that counts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gpuvirt.cluster.kinds.gpunode import Withheld
from gpuvirt.cluster.operator.kubevirt.changes import Part
from gpuvirt.cluster.operator.kubevirt.offered import Offered
from gpuvirt.cluster.operator.kubevirt.subject import Entry
from gpuvirt.model.reasons import Reason, kubevirtproblems
from gpuvirt.model.selectors import Selectors, normal


@dataclass(frozen=True, slots=True)
class ByKubeVirt:
    """A resource of ours that KubeVirt offers."""

    reason: Reason
    name: str
    """What it offers it as."""

    @property
    def withheld(self) -> Withheld:
        """What the agents are told."""
        parts = (self.reason.message, f"seen: {self.reason.seen}", f"fix: {self.reason.fix}")
        offered_as = self.name if self.name != self.reason.subject else None
        code = str(self.reason.code)
        return Withheld(resource=self.reason.subject, code=code, message="; ".join(parts), offered_as=offered_as)


def offered_by_kubevirt(
    entries: Iterable[Entry], offered: Offered, where: Callable[[Entry], str]
) -> Mapping[str, ByKubeVirt]:
    """Return the resources of ours that KubeVirt offers, by name; `where` says where an entry stands."""
    own = [one for one in entries if not one.external and not one.disabled]
    found: dict[str, ByKubeVirt] = {}
    for name, selectors in offered.items():
        same = (one for one in own if one.resource == name)
        entry = next(same, None) or next((one for one in own if selects(one, selectors)), None)
        if entry is not None:
            found[name] = ByKubeVirt(
                kubevirtproblems.foreign_provider(name, entry.resource, where(entry)), entry.resource
            )
    return found


def selects(entry: Entry, selectors: Selectors) -> bool:
    """Return whether an entry's selector finds devices of a resource."""
    its = {Part.PCI: selectors.pci, Part.MDEV: selectors.mdev, Part.USB: ()}[entry.part]
    return normal(entry.selector) in {normal(one) for one in its}
