"""The agent's state of shared GPUs: the devices of other plugins, and the units that follow from them.

Nothing here waits or changes the host.
"""

from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.ledger import KubeletAccount
from gpuvirt.model.desired.gpumodes import Modes
from gpuvirt.model.desired.settings import ShareSettings
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.offers.sharing import Sharing, share_gpus
from gpuvirt.model.shares.otherplugins import OtherPlugins, other_plugins


class SharedState:
    """The shared GPUs of one node."""

    def __init__(self, settings: ShareSettings) -> None:
        self._settings = settings
        self._plugins: OtherPlugins | Unknown = Unknown()
        self.sharing = Sharing()
        """The units of each shared GPU, as last concluded."""

    def observe_account(self, account: KubeletAccount | None) -> bool:
        """Take the kubelet's account, None if the kubelet did not answer; return whether other plugins' devices differ.

        An account that is missing or incomplete makes them unknown: another plugin may have registered since.
        """
        before = self._plugins
        self._plugins = other_plugins(account, ResourceName(self._settings.resource))
        return self._plugins != before

    def conclude(self, inventory: Inventory, modes: Modes, now_s: float) -> None:
        """Conclude the units of each GPU in mode `shared`."""
        self.sharing = share_gpus(inventory, modes, self._settings, self._plugins, self.sharing.verdict, now_s)
