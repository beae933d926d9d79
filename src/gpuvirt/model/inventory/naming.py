"""The names of resources.

They are those of NVIDIA's kubevirt-gpu-device-plugin, since manifests and KubeVirt's configuration have these names:
the text of the PCI ID database in upper case, with `_` for `/`, `.` and white space, without other characters. Names
that Kubernetes would refuse are changed. The first name that was offered for a PCI id stays when the database changes;
aliases may be given for the database's present name too.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import DeviceId, PciAddress, PciId, ResourceName, VgpuType
from gpuvirt.facts.pci import AMD, INTEL, NVIDIA, FunctionKind, Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.vgpu import LiveVgpu, UnnamedType
from gpuvirt.model.inventory.pciids import PciIds


# The VFs of a GPU list only types that can still be created, so a full GPU has vGPUs whose type no VF names.
class TypeNames(msgspec.Struct, frozen=True):
    """The known names, and what nvidia-smi answered for GPUs whose types have none."""

    driver: str | None = None
    """The version of the driver; another version may give the ids to other types."""
    by_id: Mapping[str, VgpuType] = msgspec.field(default_factory=dict)
    answers: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The answer for each GPU for which nvidia-smi was asked; an id that is not in `by_id` is in none of them."""

    def of(self, facts: Facts) -> "TypeNames":
        """Return the names of the host's present driver, none if these names are of another version."""
        version = facts.platform.nvidia_version
        return self if self.driver == version else TypeNames(version)

    def observing(self, facts: Facts) -> "TypeNames":
        """Return the names of the host's present driver, with those that its VFs list."""
        listed = {type_id: name for host in facts.vgpu_hosts.values() for type_id, name in host.type_names.items()}
        kept = self.of(facts)
        return replace(kept, by_id={**kept.by_id, **listed})

    def answered(self, gpu: PciAddress, table: Mapping[str, VgpuType] | Unread) -> "TypeNames":
        """Return the names with nvidia-smi's table of the types that a GPU supports, Unread if it could not be read."""
        if isinstance(table, Unread):
            return replace(self, answers={**self.answers, gpu: table.seen or table.detail})
        answer = f"{len(table)} types, none with this id"
        return replace(self, by_id={**table, **self.by_id}, answers={**self.answers, gpu: answer})

    def named(self, gpu: PciAddress, live: LiveVgpu) -> LiveVgpu:
        """Return a vGPU of a GPU with the name of its type, or with nvidia-smi's answer if the type has no name."""
        if not isinstance(live.type, UnnamedType):
            return live
        answer = self.answers.get(gpu, "")
        return replace(live, type=self.by_id.get(live.type.id) or live.type.after(answer))


NO_NAMES = TypeNames()

Learn = Callable[[Facts, TypeNames], TypeNames]
"""Returns the names of a host's vGPU types, by its facts and the names that are known."""


def observed_names(facts: Facts, known: TypeNames) -> TypeNames:
    """Return the known names with those that the VFs list; nvidia-smi is not asked."""
    return known.observing(facts)


NAMESPACES: Mapping[int, str] = {NVIDIA: "nvidia.com", AMD: "amd.com", INTEL: "intel.com"}

NAME_CHARACTERS = 63
"""The maximum length of the part after `/` (Kubernetes' qualified names)."""

_DIGEST_DIGITS = 8


def from_text(text: str) -> str:
    """Return the name for a device's text in the PCI ID database."""
    name = text.strip().upper().replace("/", "_").replace(".", "_")
    return re.sub(r"[^A-Za-z0-9_.]", "", re.sub(r"\s+", "_", name))


@lru_cache(1024)
def from_type(vgpu_type: VgpuType) -> str:
    """Return the name for a vGPU type, in which only white space changes."""
    return re.sub(r"\s+", "_", vgpu_type.strip())


@lru_cache(1024)
def legal(name: str) -> str | None:
    """Return `name` as a name that Kubernetes accepts, None if no character is left.

    Such a name has letters, digits, `-`, `_` and `.`, begins and ends with a letter or digit, and has at most 63
    characters. A longer one keeps its beginning and gets a digest of the whole name, so that two such names differ.
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
    """Return the CDI kind of a resource: its name, with a prefix for each part that does not begin with a letter."""
    vendor, name = resource.split("/")
    return f"{vendor if vendor[0].isalpha() else f'gpu.{vendor}'}/{name if name[0].isalpha() else f'GPU_{name}'}"


def cdi_name(resource: ResourceName, device: DeviceId) -> str:
    """Return the qualified name of a CDI device: `nvidia.com/GA102GL_A10=0000:65:00.0`."""
    return f"{cdi_kind(resource)}={device}"


class Named(msgspec.Struct, frozen=True):
    """A resource's name, with the names from which it follows."""

    resource: ResourceName
    key: str | None = None
    """The key of the first name in the ledger: the PCI id; None for names that can't change."""
    first: str | None = None
    """The first name, before any alias."""
    natural: str | None = None
    """The database's present name, if it differs from the first name."""


class Naming(msgspec.Struct, frozen=True):
    """The database, aliases and first names that decide the names of resources."""

    ids: PciIds
    aliases: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The admin's aliases of names: `GA102GL_A10` -> `a10`, or `example.com/a10`."""
    first_names: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The name that was first offered for each PCI id on this node."""
    kind_aliases: Mapping[FunctionKind, str] = msgspec.field(default_factory=dict)
    """The one name of all NVIDIA functions of a kind that have no alias of their own: `pgpu`."""

    def of_function(
        self, pci_id: PciId, kind: FunctionKind | None = None, *, is_vf: bool = False, parts: int = 1
    ) -> Named:
        """Return the name of a whole PCI function. If the database lacks its id, the name is the id (`2571`).

        `parts` is the number of VFs that share its GPU evenly: VFs of GPUs that are split otherwise are of other sizes.
        """
        suffix = f"{'_VF' if is_vf else ''}{f'_1_{parts}' if parts > 1 else ''}"
        text = self.ids.text(pci_id)
        natural = legal(from_text(text) + suffix) if text is not None else None
        natural = natural or f"{pci_id.device:04x}{suffix}"
        key = f"{pci_id}{suffix.lower()}"
        first = self.first_names.get(key, natural)
        of_kind = self.kind_aliases.get(kind) if kind is not None and pci_id.vendor == NVIDIA and not is_vf else None
        resource = self._resource(pci_id.vendor, first, natural, of_kind)
        return Named(resource, key, first, natural if natural != first else None)

    def of_type(self, vendor: int, vgpu_type: VgpuType) -> Named:
        """Return the name of a vGPU type."""
        return Named(self._resource(vendor, legal(from_type(vgpu_type)) or "vgpu"))

    def _resource(self, vendor: int, name: str, natural: str | None = None, of_kind: str | None = None) -> ResourceName:
        """Return the resource's name. Aliases of its present name count too, with the domain or without."""
        domain = NAMESPACES.get(vendor, "gpuvirt.io")
        names = (name,) if natural is None else (name, natural)
        keys = (key for known in names for key in (f"{domain}/{known}", known))
        chosen = next((self.aliases[key] for key in keys if key in self.aliases), of_kind or name)
        return ResourceName(chosen if "/" in chosen else f"{domain}/{chosen}")
