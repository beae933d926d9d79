"""The CustomResourceDefinition of ClusterPolicy: that of NVIDIA's operator, with additional rules.

NVIDIA's also accepts each object that it accepts, so that users can go back without edits: nine keys are required
although gpuvirt does not need them, and `image` is checked as there. The container half keeps the fields of newer
versions. The VM half knows all of its fields, so the API server rejects a misspelt one, which would otherwise be
ignored.
"""

from crd import Crd, whole
from crdschema import Rule, Schema, description_of, structural, without_nulls
from msgspec.structs import replace

from gpuvirt.controller.operands import images, inputs
from gpuvirt.kube.kinds import clusterpolicy

HEAD = """\
# ClusterPolicy: the desired state of all nodes with GPUs (docs/reference.md), in the schema of NVIDIA's operator.
# Where that operator's CRD is installed, leave this one out. It accepts the same objects, with additional checks.
# Generated from src/gpuvirt/kube/kinds/clusterpolicy.py by `make generate`.
"""
COLUMNS = (("Status", "string", ".status.state"), ("Age", "date", ".metadata.creationTimestamp"))

# Whether an operand's image is given in part or completely.
_PARTS = "(has(self.repository) && self.repository != '' || has(self.version) && self.version != '')"
_ALL = (
    "(has(self.repository) && self.repository != '' && has(self.image) && self.image != ''"
    " && has(self.version) && self.version != '')"
)
_OFF = "has(self.enabled) && !self.enabled"
_IMAGE = Rule(f"{_OFF} || !{_PARTS} || {_ALL}", images.INCOMPLETE)
_IMAGE_OF_YOURS = Rule(f"!(has(self.enabled) && self.enabled) || !{_PARTS} || {_ALL}", images.INCOMPLETE)
_BARE = Rule(
    f"!(has(self.enabled) && self.enabled) || {_PARTS} || !has(self.image) || self.image == ''"
    " || self.image.contains('/') || self.image.contains('@')",
    images.BARE,
)
_NRI = Rule(
    "!(has(self.cdi) && has(self.cdi.nriPluginEnabled) && self.cdi.nriPluginEnabled)"
    " || !(has(self.cdi.enabled) && !self.cdi.enabled)"
    " && !(has(self.toolkit) && has(self.toolkit.enabled) && !self.toolkit.enabled)",
    inputs.NRI_NEEDS,
)
_UNAVAILABLE = Rule(
    f"self.matches('{inputs.UNAVAILABLE}')",
    inputs.NOT_A_SHARE,
)
_RULES: tuple[tuple[str, tuple[Rule, ...]], ...] = (
    ("", (_NRI,)),
    ("driver", (_IMAGE,)),
    ("toolkit", (_IMAGE,)),
    ("devicePlugin", (_IMAGE,)),
    ("dcgm", (_IMAGE,)),
    ("dcgmExporter", (_IMAGE,)),
    ("gfd", (_IMAGE,)),
    ("migManager", (_IMAGE,)),
    ("vgpuManager", (_IMAGE_OF_YOURS, _BARE)),
    ("daemonsets.rollingUpdate.maxUnavailable", (_UNAVAILABLE,)),
)
_MOST_UNAVAILABLE = 16
"""The longest accepted text in characters. The API server limits the cost of rules, so the pattern needs a limit."""


def _schema() -> Schema:
    spec = replace(without_nulls(structural(clusterpolicy.Spec)), required=clusterpolicy.REQUIRED)
    for path, rules in _RULES:
        spec = _changed(spec, path, rules)
    status = without_nulls(structural(clusterpolicy.Status))
    conditions = replace(status.properties["conditions"], list_type="map", list_map_keys=("type",))
    status = replace(status, properties={**status.properties, "conditions": conditions}, required=("state",))
    return whole(description_of(clusterpolicy.ClusterPolicy), spec, status)


def _changed(schema: Schema, path: str, rules: tuple[Rule, ...]) -> Schema:
    """Return a schema with rules added at a path."""
    if not path:
        longest = _MOST_UNAVAILABLE if _UNAVAILABLE in rules else None
        return replace(schema, rules=rules, max_length=longest)
    name, _, rest = path.partition(".")
    inner = _changed(schema.properties[name], rest, rules)
    return replace(schema, properties={**schema.properties, name: inner})


CRD = Crd(
    "clusterpolicies.yaml",
    HEAD,
    clusterpolicy.GROUP,
    clusterpolicy.VERSION,
    clusterpolicy.KIND,
    clusterpolicy.PLURAL,
    _schema(),
    COLUMNS,
)
