"""The desired state of a node, from the cluster or the settings: modes of GPUs, vGPU configs, the chosen config."""

from gpuvirt.model.change.vgpus.desiredvgpus import ConfigSet, config_name, read_config_set, without_text
from gpuvirt.model.desired.observed import ConfigText
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.desired.workload import modes_of, overridden_label
from gpuvirt.node.known.state import NodeState
from gpuvirt.node.store.desiredstatestore import DesiredStateStore


class DesiredState:
    """Derives the desired state of one node from requests and settings; each text of configs is parsed once."""

    def __init__(
        self,
        state: NodeState,
        store: DesiredStateStore,
        file: ConfigText | None,
        *,
        in_cluster: bool,
        follows_spec: bool,
    ) -> None:
        """`file` has the configs that apply without a ConfigMap. `follows_spec`: the agent watches its GpuNode."""
        self._state = state
        self._store = store
        self._in_cluster = in_cluster
        self._follows_spec = follows_spec
        self._base = read_config_set(file, ConfigSet()) if file is not None else ConfigSet()
        named = state.settings.vgpu_config_map
        self._config_map = named if named != Settings().vgpu_config_map else None
        """The ConfigMap that the settings name; None for the default one, which need not exist."""
        self._config_set = self._base
        self._read: ConfigText | None = None
        """The text that was parsed last, valid or not."""
        if store.good_configs is not None:
            self._take(store.good_configs)

    def conclude(self) -> None:
        """Update the node's state by the newest desired state."""
        request = self._store.desired
        if request.configs is not None and request.configs.value is not None:
            self._take(request.configs.value)
        elif request.configs is not None:
            self._config_set = without_text(self._config_set, self._base, self._config_map)
            self._read = None
        observed = not self._in_cluster or request.configs is not None or self._config_set.good is not None
        self._state.set_vgpu_configs(self._config_set if observed else None, self._config_set.problem)
        self._state.set_spec(request.spec.value if request.spec is not None else None)
        if self._follows_spec and request.spec is None:
            return  # labels and settings count only without a GpuNode's spec, which is still unknown
        settings = self._state.settings
        modes, problem = modes_of(settings, request, self._state.modes)
        self._state.set_modes(modes, request, problem or overridden_label(request))
        if problem is None or not request.has_spec:
            self._state.set_vgpu_config(config_name(request, settings, in_cluster=self._in_cluster))

    def _take(self, text: ConfigText) -> None:
        if text == self._read:
            return
        self._read = text
        self._config_set = read_config_set(text, self._config_set)
        if self._config_set.problem is None:
            self._store.observe_good_configs(text)
