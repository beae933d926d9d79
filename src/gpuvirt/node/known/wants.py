"""What is wanted of a node, as the cluster or the settings say it: modes of GPUs, vGPU configs and which of them."""

from gpuvirt.model.change.vgpus.desiredvgpus import Book, config_name, read_book, without_text
from gpuvirt.model.desired.observed import ConfigText
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.desired.workload import modes_of, overridden_label
from gpuvirt.node.known.state import NodeState
from gpuvirt.node.store.desiredstatestore import DesiredStateStore


class Wants:
    """Lets the state know what follows from all that was heard; a text of configs is read once."""

    def __init__(
        self,
        state: NodeState,
        store: DesiredStateStore,
        file: ConfigText | None,
        *,
        in_cluster: bool,
        hears_spec: bool,
    ) -> None:
        """`file` has the configs that stand where no ConfigMap does; `hears_spec`: somebody follows its GpuNode."""
        self._state = state
        self._store = store
        self._in_cluster = in_cluster
        self._hears_spec = hears_spec
        self._base = read_book(file, Book()) if file is not None else Book()
        named = state.settings.vgpu_config_map
        self._config_map = named if named != Settings().vgpu_config_map else None
        """The ConfigMap that the settings ask for; None where they leave it at the one that need not be there."""
        self._book = self._base
        self._read: ConfigText | None = None
        """The text that was read last, whether or not it could be used."""
        if store.good_configs is not None:
            self._take(store.good_configs)

    def conclude(self) -> None:
        """Let the state know what is wanted, by all that was heard."""
        request = self._store.desired
        if request.configs is not None and request.configs.value is not None:
            self._take(request.configs.value)
        elif request.configs is not None:
            self._book = without_text(self._book, self._base, self._config_map)
            self._read = None
        observed = not self._in_cluster or request.configs is not None or self._book.good is not None
        self._state.set_vgpu_configs(self._book if observed else None, self._book.problem)
        self._state.set_spec(request.spec.value if request.spec is not None else None)
        if self._hears_spec and request.spec is None:
            return  # labels and settings count where there is no spec, and whether there is one is not known yet
        settings = self._state.settings
        modes, problem = modes_of(settings, request, self._state.modes)
        self._state.set_modes(modes, request, problem or overridden_label(request))
        if problem is None or not request.has_spec:
            self._state.set_vgpu_config(config_name(request, settings, in_cluster=self._in_cluster))

    def _take(self, text: ConfigText) -> None:
        if text == self._read:
            return
        self._read = text
        self._book = read_book(text, self._book)
        if self._book.problem is None:
            self._store.observe_good_configs(text)
