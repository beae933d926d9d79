"""A CustomResourceDefinition as a manifest."""

from dataclasses import dataclass

import msgspec
import yaml
from crdschema import Schema
from typing_extensions import override

from gpuvirt.controller.definitions import OURS, PART_OF


@dataclass(frozen=True, slots=True)
class Crd:
    """The content of a CustomResourceDefinition."""

    file: str
    """The file's name below deploy/."""
    head: str
    """The comment at the beginning of the file."""
    group: str
    version: str
    kind: str
    plural: str
    schema: Schema
    columns: tuple[tuple[str, str, str], ...]
    """The columns of `kubectl get`: name, type, path."""
    short_names: tuple[str, ...] = ()
    scope: str = "Cluster"
    """Cluster or Namespaced."""

    def manifest(self) -> str:
        """Return the content of the file."""
        version = {
            "name": self.version,
            "served": True,
            "storage": True,
            "subresources": {"status": {}},
            "additionalPrinterColumns": [
                dict(zip(("name", "type", "jsonPath"), column, strict=True)) for column in self.columns
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
            "spec": {"group": self.group, "scope": self.scope, "names": names, "versions": [version]},
        }
        return self.head + yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """YAML without aliases, which are hard to read."""

    @override
    def ignore_aliases(self, data: object) -> bool:
        return True


def whole(description: str, spec: Schema, status: Schema, *, required: tuple[str, ...] = ()) -> Schema:
    """Return the schema of a whole object; the API server checks the metadata by itself."""
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
