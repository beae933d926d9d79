"""Reads the shapes in which claims can get a host's GPUs; it takes a scan of the host, and is loaded for that alone."""

from msgspec.structs import replace

from gpuvirt.agent.change.changehost import ChangeHost, Inputs
from gpuvirt.agent.change.observation import observe
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions.deviceids import read_device_ids
from gpuvirt.hardware.functions.pci import read_root
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.dra.pool import Shapes
from gpuvirt.model.dra.shapes import UNKNOWN, LoadedDriver, ShapingHost, shapes_of
from gpuvirt.model.inventory.pciids import PciIds


def read_shapes(change_host: ChangeHost, inputs: Inputs, names: PciIds) -> Shapes | Unread:
    """Return the shapes of a host's GPUs; Unread where the loaded driver is not known."""
    found = with_shaping(change_host.kernel, observe(change_host, inputs).host_state(), names)
    return found if isinstance(found, Unread) else shapes_of(*found)


def with_shaping(kernel: Kernel, state: UnitState, names: PciIds) -> tuple[UnitState, ShapingHost] | Unread:
    """Return a host with what decides on shapes beside its drivers; Unread where the loaded driver is not known."""
    platform, inventory = state.inventory.facts.platform, state.inventory
    if isinstance(platform.vgpu_manager, Unread):
        return platform.vgpu_manager
    driver = LoadedDriver.DATACENTER if platform.nvidia_version is not None else LoadedDriver.NONE
    driver = LoadedDriver.MANAGER if platform.vgpu_manager else driver
    ids = read_device_ids(kernel, inventory.facts.functions.values())
    state = replace(state, inventory=replace(inventory, facts=replace(inventory.facts, device_ids=ids)))
    found = {gpu: read_root(kernel, gpu) for gpu in inventory.gpus}
    roots = {gpu: root if isinstance(root, str) else UNKNOWN for gpu, root in found.items()}
    return state, ShapingHost(driver, names, roots)
