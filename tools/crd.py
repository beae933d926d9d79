"""A CustomResourceDefinition as a manifest."""

from dataclasses import dataclass

import msgspec
import yaml
from typing_extensions import override

from gpuvirt.cluster.kinds.schema import Schema
from gpuvirt.cluster.operator.definitions import OURS, PART_OF


@dataclass(frozen=True, slots=True)
class Crd:
    """What there is to say of a kind."""

    file: str
    """Below deploy/."""
    head: str
    """The comment that the file begins with."""
    group: str
    version: str
    kind: str
    plural: str
    schema: Schema
    columns: tuple[tuple[str, str, str], ...]
    """What `kubectl get` prints: name, type, path."""
    short_names: tuple[str, ...] = ()

    def manifest(self) -> str:
        """Return the file's content."""
        version = {
            "name": self.version,
            "served": True,
            "storage": True,
            "subresources": {"status": {}},
            "additionalPrinterColumns": [
                dict(zip(("name", "type", "jsonPath"), one, strict=True)) for one in self.columns
            ],
            "schema": {"openAPIV3Schema": msgspec.to_builtins(self.schema)},
        }
        names: dict[str, object] = {"kind": self.kind, "plural": self.plural, "singular": self.kind.lower()}
        if self.short_names:
            names["shortNames"] = list(self.short_names)
        content = {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{self.plural}.{self.group}", "labels": {PART_OF: OURS}},
            "spec": {"group": self.group, "scope": "Cluster", "names": names, "versions": [version]},
        }
        return self.head + yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """YAML without aliases, which kubectl reads and people don't."""

    @override
    def ignore_aliases(self, data: object) -> bool:
        return True


def whole(description: str, spec: Schema, status: Schema, *, required: tuple[str, ...] = ()) -> Schema:
    """Return what the API server checks objects by; it checks their metadata itself."""
    return Schema(
        description=description,
        type="object",
        properties={
            "apiVersion": Schema(type="string"),
            "kind": Schema(type="string"),
            "metadata": Schema(type="object"),
            "spec": spec,
            "status": status,
        },
        required=required,
    )
