"""Label selectors: which objects a selector of the API matches by their labels.

Source: Kubernetes' API reference, meta/v1, LabelSelector: all requirements must hold; NotIn and DoesNotExist hold for
an object without the label; a selector without requirements matches each object. The owner of the field that holds a
selector says what null means there; mostly, that it matches none.
"""

from collections.abc import Mapping

import msgspec


class Requirement(msgspec.Struct, frozen=True, gc=False):
    """A requirement on the value of one label."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Return whether labels satisfy the requirement; an operator that is not known is never satisfied."""
        match self.operator:
            case "In":
                return self.key in labels and labels[self.key] in self.values
            case "NotIn":
                return self.key not in labels or labels[self.key] not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels
            case _:
                return False


class LabelSelector(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A selector of objects by their labels."""

    match_labels: dict[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether all requirements hold for labels."""
        if any(labels.get(key) != value for key, value in self.match_labels.items()):
            return False
        return all(requirement.holds(labels) for requirement in self.match_expressions)
