"""The names of on-demand resources: `tencent.com/vgpu-492` by the number of a type, or NVIDIA's name of the type."""

import re
from collections.abc import Iterable, Mapping

from gpuvirt.facts.ids import ResourceName, VgpuType
from gpuvirt.facts.vgpu import VgpuHost
from gpuvirt.model.desired.settings import OnDemandNames, OnDemandSettings
from gpuvirt.model.inventory.naming import Naming
from gpuvirt.model.vgputypes.profiles import profile_name

_NUMBER = re.compile(r"(?:nvidia-)?([0-9]{1,9})")
"""The host's ids of types: `nvidia-492` (mdev), `1428` (vendor VFIO)."""


def resource_of(
    settings: OnDemandSettings, naming: Naming, vendor: int, numbers: Mapping[VgpuType, str], vgpu_type: VgpuType
) -> ResourceName:
    """Return the resource of a type; a type without a number gets its name."""
    if settings.names is OnDemandNames.NUMBER and (number := numbers.get(vgpu_type)) is not None:
        return ResourceName(f"{settings.prefix}{number}")
    return naming.of_type(vendor, vgpu_type).resource


def type_numbers(hosts: Iterable[VgpuHost]) -> Mapping[VgpuType, str]:
    """Return the numbers of types, by the hosts' ids of them."""
    found: dict[VgpuType, str] = {}
    for host in hosts:
        named = ((type_id, vgpu_type) for vgpu_type, type_id in host.type_ids.items())
        for type_id, vgpu_type in (*named, *host.type_names.items()):
            if number := _NUMBER.fullmatch(type_id):
                found.setdefault(vgpu_type, number[1])
    return found


def is_offered(settings: OnDemandSettings, vgpu_type: VgpuType) -> bool:
    """Return whether the settings offer a type: `A10-4Q` and `NVIDIA A10-4Q` name the same one."""
    return not settings.types or bool({vgpu_type, profile_name(vgpu_type)} & set(settings.types))
