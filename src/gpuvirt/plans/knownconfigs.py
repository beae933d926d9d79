"""The vGPU configs that the agents of a cluster know: the built-in ones, and those of the ClusterPolicy's ConfigMap."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import msgspec

from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ForbiddenError, NotFoundError
from gpuvirt.kube.kinds.clusterpolicy import CLUSTER_POLICIES, KIND, SpecFault, StoredPolicy, choose
from gpuvirt.kube.kinds.core import ConfigMap
from gpuvirt.kube.resources import Collection, config_maps
from gpuvirt.model.change.vgpus.desiredvgpus import ConfigSet, read_config_set
from gpuvirt.model.desired.observed import ConfigText
from gpuvirt.model.desired.vgpuconfig import builtin_configs
from gpuvirt.model.inventory.nearness import correction
from gpuvirt.model.reasons import Reason, ReasonCode, Seen
from gpuvirt.model.reasons.nodeproblems import config_invalid
from gpuvirt.model.workers.spec import Phase

CONFIG_KEY = "config.yaml"
Texts = Mapping[str, str]
"""The data of a ConfigMap."""


class KnownConfigs(msgspec.Struct, frozen=True):
    """The vGPU configs beside the built-in ones."""

    configs: ConfigSet = msgspec.field(default_factory=ConfigSet)
    where: str = ""
    """The ConfigMap that has them, or could: `ConfigMap gpuvirt/vgpu-configs`."""
    unread: str | None = None
    """Why they are not known; None if they are."""

    def has(self, name: str) -> bool | None:
        """Return whether a config has this name; None if that is not known."""
        if name in builtin_configs() or name in self.configs.configs:
            return True
        return False if self.unread is None else None

    def faults(self, phases: Iterable[Phase]) -> tuple[Reason, ...]:
        """Return the phases whose vGPU config no config is certain to be named like."""
        return tuple(
            self._fault(phase.name, phase.vgpu_config)
            for phase in phases
            if phase.vgpu_config is not None and self.has(phase.vgpu_config) is not True
        )

    def _fault(self, phase: str, name: str) -> Reason:
        if self.unread is not None:
            return Reason(
                ReasonCode.VGPU_CONFIGS_UNKNOWN,
                f"phase {phase}",
                f"names the vGPU config {name}, and gpuvirt does not know whether it exists: {self.unread}",
                fix="see the ClusterPolicy's ConfigMap",
            )
        hint = correction(name, [*self.configs.configs, *builtin_configs()])
        return config_invalid(
            f"phase {phase}",
            f"names the vGPU config {name}, which does not exist",
            "correct vgpuConfig of the phase, or add the vGPU config to"
            f" {self.where}{f'; {hint}' if hint is not None else ''}",
            Seen("vGPU configs", f"those of {self.where}, and the built-in ones (gpuvirt vgpu default-config)"),
        )


def configs_known(
    stored: Iterable[StoredPolicy], namespace: str, texts_of: Callable[[str], Texts | None]
) -> KnownConfigs:
    """Return the configs by the cluster's policies; `texts_of` returns the data of a ConfigMap, None if it is missing.

    A ConfigMap that is missing, or has no configs, is no error here: agents then have the built-in ones.
    """
    choice = choose(stored)
    if choice is None:
        return KnownConfigs(unread="the cluster has no ClusterPolicy, which names the ConfigMap of vGPU configs")
    if isinstance(choice.policy, SpecFault):
        return KnownConfigs(unread=f"{KIND} {choice.stored.metadata.name} is invalid")
    name = choice.policy.spec.vgpu_device_manager.config_map
    where = f"ConfigMap {namespace}/{name}"
    text = (texts_of(name) or {}).get(CONFIG_KEY)
    return KnownConfigs(where=where) if text is None else _of_text(text, where)


@lru_cache(maxsize=2)
def _of_text(text: str, where: str) -> KnownConfigs:
    found = read_config_set(ConfigText(text, f"{where}, key {CONFIG_KEY}"), ConfigSet())
    return KnownConfigs(found, where, found.problem.reason.text if found.problem is not None else None)


async def read_known_configs(client: Client, namespace: str) -> KnownConfigs:
    """Return the configs as the API server has them; raises ApiError, except for objects that the user may not read."""
    stored, found = tuple[StoredPolicy, ...](), dict[str, Texts]()
    try:
        stored = (await client.list(Collection(CLUSTER_POLICIES, StoredPolicy))).items
        choice = choose(stored)
        if choice is not None and not isinstance(choice.policy, SpecFault):
            name = choice.policy.spec.vgpu_device_manager.config_map
            found[name] = (await client.get(config_maps(namespace), name, ConfigMap)).data
    except ForbiddenError as error:
        return KnownConfigs(unread=str(error))
    except NotFoundError:
        pass  # no kind ClusterPolicy, or no ConfigMap
    return configs_known(stored, namespace, found.get)
