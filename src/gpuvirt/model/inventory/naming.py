"""What resources are called.

The names are those of NVIDIA's kubevirt-gpu-device-plugin, since they stand in people's manifests and in KubeVirt's
configuration: the text of the PCI ID database, upper case, `/` and `.` as `_`, white space as `_`, the rest dropped.
Names that Kubernetes would refuse are made legal. The name first offered for a PCI id stays, whatever a later database
says; what the database says now is kept beside it as another name.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuvirt.facts.ids import DeviceId, PciId, ResourceName, VgpuType
from gpuvirt.facts.pci import AMD, INTEL, NVIDIA
from gpuvirt.model.inventory.pciids import PciIds

NAMESPACES: Mapping[int, str] = {NVIDIA: "nvidia.com", AMD: "amd.com", INTEL: "intel.com"}

NAME_CHARACTERS = 63
"""The most that the part after `/` may have (Kubernetes' qualified names)."""

_DIGEST_DIGITS = 8


def from_text(text: str) -> str:
    """Return the name that a device's text in the PCI ID database gives."""
    name = text.strip().upper().replace("/", "_").replace(".", "_")
    return re.sub(r"[^A-Za-z0-9_.]", "", re.sub(r"\s+", "_", name))


def from_type(vgpu_type: VgpuType) -> str:
    """Return the name that a vGPU type gives: only white space changes."""
    return re.sub(r"\s+", "_", vgpu_type.strip())


def legal(name: str) -> str | None:
    """Return `name` as Kubernetes takes it, None when nothing of it is left.

    It may have letters, digits, `-`, `_` and `.`, begin and end with a letter or digit, and have 63 characters. One
    that is too long keeps its beginning and gets a digest of the whole, so that two such names stay two.
    """
    kept = re.sub(r"[^-A-Za-z0-9_.]", "", name).strip("-_.")
    if len(kept) > NAME_CHARACTERS:
        digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_DIGITS].upper()
        kept = f"{kept[: NAME_CHARACTERS - _DIGEST_DIGITS - 1].rstrip('-_.')}_{digest}"
    return kept or None


def env_name(prefix: str, resource: ResourceName) -> str:
    """Return the environment variable in which KubeVirt looks for a resource's devices.

    Source: KubeVirt, pkg/util/util.go, ResourceNameToEnvVar: upper case, `/` and `.` as `_`; a hyphen stays.
    """
    return f"{prefix}_{resource.upper().replace('/', '_').replace('.', '_')}"


def cdi_kind(resource: ResourceName) -> str:
    """Return the kind of a resource's CDI devices: its name, but that both parts must begin with a letter."""
    vendor, name = resource.split("/")
    return f"{vendor if vendor[0].isalpha() else f'gpu.{vendor}'}/{name if name[0].isalpha() else f'GPU_{name}'}"


def cdi_name(resource: ResourceName, device: DeviceId) -> str:
    """Return what a CDI device is called: `nvidia.com/GA102GL_A10=0000:65:00.0`."""
    return f"{cdi_kind(resource)}={device}"


@dataclass(frozen=True, slots=True)
class Named:
    """A resource's name, and what else it could be called."""

    resource: ResourceName
    key: str | None = None
    """What the first name is kept under: the PCI id; None where names can't change."""
    first: str | None = None
    """That first name, before any alias."""
    natural: str | None = None
    """The name that the database gives today, where it is another than the first."""


@dataclass(frozen=True, slots=True)
class Naming:
    """All that decides names."""

    ids: PciIds
    aliases: Mapping[str, str] = field(default_factory=dict)
    """What the admin calls a name instead: `GA102GL_A10` -> `a10`, or `example.com/a10`."""
    first_names: Mapping[str, str] = field(default_factory=dict)
    """The name that was first offered for each PCI id on this node."""

    def of_function(self, pci_id: PciId, *, is_vf: bool = False) -> Named:
        """Return the name of a whole PCI function; an unknown id is its own name (`2571`), as it always was."""
        suffix = "_VF" if is_vf else ""
        text = self.ids.text(pci_id)
        natural = legal(from_text(text) + suffix) if text is not None else None
        natural = natural or f"{pci_id.device:04x}{suffix}"
        key = f"{pci_id}{suffix.lower()}"
        first = self.first_names.get(key, natural)
        return Named(self._resource(pci_id.vendor, first, natural), key, first, natural if natural != first else None)

    def of_type(self, vendor: int, vgpu_type: VgpuType) -> Named:
        """Return the name of a vGPU type."""
        return Named(self._resource(vendor, legal(from_type(vgpu_type)) or "vgpu"))

    def _resource(self, vendor: int, name: str, natural: str | None = None) -> ResourceName:
        """Return the resource's name; an alias may be given for today's name, too, with the domain or without."""
        domain = NAMESPACES.get(vendor, "gpuvirt.io")
        names = (name,) if natural is None else (name, natural)
        known_as = (full for one in names for full in (f"{domain}/{one}", one))
        called = next((self.aliases[one] for one in known_as if one in self.aliases), name)
        return ResourceName(called if "/" in called else f"{domain}/{called}")
