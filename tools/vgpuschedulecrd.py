"""The CustomResourceDefinition of VgpuSchedule.

The API server refuses what the controller would report as a fault of the spec, where a pattern or a short rule can say
it. Cron lines, time zones and workers of two schedules are checked by the controller alone.
"""

from crd import Crd, whole
from crdschema import Rule, Schema, UnfitTypeError, description_of, structural, without_nulls
from msgspec.structs import replace

from gpuvirt.kube.kinds import vgpuschedule
from gpuvirt_schedules.controller.objects import LONGEST_DURATION
from gpuvirt_schedules.decide.faults import LONGEST_NAME
from gpuvirt_schedules.decide.history import LONGEST_USER
from gpuvirt_schedules.decide.times import LONGEST_LINE

HEAD = """\
# VgpuSchedule: which worker VMs run in which phase (docs/schedules.md).
# Generated from src/gpuvirt/kube/kinds/vgpuschedule.py by `make generate`.
"""
COLUMNS = (
    ("Phase", "string", ".status.phase"),
    ("Next", "string", ".status.nextPhase"),
    ("At", "string", ".status.nextSwitch"),
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason'),
    ("Paused", "boolean", ".spec.suspend"),
    ("Age", "date", ".metadata.creationTimestamp"),
)
MOST_PHASES = 16
MOST_OVERRIDES = 64
MOST_PROFILES = 16
LONGEST_TYPE = 128
LONGEST_TIME = 19
_DURATION = r"^([0-9]+(\.[0-9]+)?[hms])+$"
_TIME = "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(:[0-9]{2})?$"
_NAME = Rule(
    f"size(self.metadata.name) <= {LONGEST_NAME}",
    "has a name of more than 63 characters, which no label of a node can have",
)
_SELECTS = Rule(
    "has(self.matchLabels) && size(self.matchLabels) > 0"
    " || has(self.matchExpressions) && size(self.matchExpressions) > 0",
    "selects every node of the cluster; name at least one label",
)
_HYPERVISOR = Rule(
    "[has(self.vsphere), has(self.libvirt), has(self.kubeVirt)].filter(found, found).size() == 1",
    "names no hypervisor, or several; expected one of vsphere.secretRef, libvirt.secretRef, kubeVirt.namespace",
)
_PHASES = Rule(
    "!has(self.overrides) || self.overrides.all(entry, self.phases.exists(phase, phase.name == entry.phase))",
    "an override names a phase that is not in phases",
)
_WORKERS = Rule(
    "has(self.hypervisor) || !self.phases.exists(phase, has(phase.workers))",
    "has phases with workers, and no hypervisor that runs their VMs",
)


def _schema() -> Schema:
    spec, status = without_nulls(structural(vgpuschedule.Spec)), structural(vgpuschedule.Status)
    fields = spec.properties
    drain = fields["drain"]
    timeout = _text(drain.properties["timeout"], LONGEST_DURATION, _DURATION)
    changed = {
        "hypervisor": replace(fields["hypervisor"], rules=(_HYPERVISOR,)),
        "phases": _phases(fields["phases"]),
        "overrides": _overrides(fields["overrides"]),
        "announce": _text(fields["announce"], LONGEST_DURATION, _DURATION),
        "drain": replace(drain, properties={**drain.properties, "timeout": timeout}),
    }
    conditions = replace(status.properties["conditions"], list_type="map", list_map_keys=("type",))
    schema = whole(
        description_of(vgpuschedule.VgpuSchedule),
        replace(spec, properties={**fields, **changed}, required=("phases",), rules=(_PHASES, _WORKERS)),
        replace(status, properties={**status.properties, "conditions": conditions}),
        required=("spec",),
    )
    return replace(schema, rules=(_NAME,))


def _phases(phases: Schema) -> Schema:
    item = _item_of(phases)
    fields = item.properties
    changed = {
        "name": _text(fields["name"], LONGEST_NAME, "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"),
        "start": replace(fields["start"], max_length=LONGEST_LINE),
        "workers": replace(fields["workers"], rules=(_SELECTS,)),
        "profiles": _profiles(fields["profiles"]),
    }
    items = replace(item, properties={**fields, **changed})
    return replace(phases, items=items, min_items=1, max_items=MOST_PHASES, list_type="map", list_map_keys=("name",))


def _profiles(profiles: Schema) -> Schema:
    item = _item_of(profiles)
    fields = item.properties
    changed = {"vgpuType": _text(fields["vgpuType"], LONGEST_TYPE, r"^\S+$")}
    items = replace(item, properties={**fields, **changed})
    return replace(profiles, items=items, max_items=MOST_PROFILES, list_type="map", list_map_keys=("vgpuType",))


def _overrides(overrides: Schema) -> Schema:
    item = _item_of(overrides)
    fields = item.properties
    changed = {
        "phase": replace(fields["phase"], max_length=LONGEST_NAME),
        "from": _text(fields["from"], LONGEST_TIME, _TIME),
        "until": _text(fields["until"], LONGEST_TIME, _TIME),
        "by": replace(fields["by"], max_length=LONGEST_USER),
    }
    items = replace(item, properties={**fields, **changed})
    return replace(overrides, items=items, max_items=MOST_OVERRIDES)


def _item_of(field: Schema) -> Schema:
    if field.items is None:
        raise UnfitTypeError("expected a list")
    return field.items


def _text(field: Schema, longest: int, pattern: str) -> Schema:
    return replace(field, max_length=longest, pattern=pattern)


CRD = Crd(
    "vgpuschedules.yaml",
    HEAD,
    vgpuschedule.GROUP,
    vgpuschedule.VERSION,
    vgpuschedule.KIND,
    vgpuschedule.PLURAL,
    _schema(),
    COLUMNS,
    ("vgpusched",),
    "Namespaced",
)
