"""The files of NVIDIA's driver for a GPU that it is bound to: `/dev/nvidia0`, its folder in /proc, and `unbindLock`.

`information` is that of driver 580.159.04 on an H200. `unbindLock` follows NVIDIA's source (nv-procfs.c, 595.45.04): it
reads 1 after a 1 was written while no process had the GPU open. Only the vGPU manager's driver has it there; here each
GPU does. Unbinding the driver from an open GPU waits until the GPU is closed.
"""

import uuid
from collections.abc import Callable, Mapping

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA, FunctionKind, kind_of
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.drivers import DriverObjects
from gpuvirt_sim.devices.function import SimFunction
from gpuvirt_sim.files import written
from gpuvirt_sim.files.tree import DeviceNode, File, Tree, constant

MAJOR = 195
GPUS = "/proc/driver/nvidia/gpus"
UUID_SPACE = uuid.UUID("0b1f6c0e-3f0a-4a55-8a0e-5b0c8a5f6d21")


INFORMATION = """\
Model: \t\t {model}
IRQ:   \t\t 41
GPU UUID: \t {uuid}
Video BIOS: \t 96.00.a5.00.1a
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t {slot}
Device Minor: \t {minor}
GPU Firmware: \t 580.159.04
GPU Excluded:\t No
"""


def gpu_uuid(address: PciAddress) -> str:
    """Return the UUID that NVIDIA's driver gives a simulated GPU (`GPU-...`), the same in every run."""
    return f"GPU-{uuid.uuid5(UUID_SPACE, address)}"


class NvidiaDriver:
    """The driver and its GPUs; `inner` makes their vGPU types."""

    def __init__(
        self,
        tree: Tree,
        functions: Mapping[PciAddress, SimFunction],
        inner: DriverObjects,
        is_open: Callable[[str], bool],
    ) -> None:
        self._tree = tree
        self._functions = functions
        self._inner = inner
        self._is_open = is_open
        self._minors: dict[PciAddress, int] = {}
        self._locked: set[PciAddress] = set()
        self._waiting: dict[PciAddress, Callable[[], None]] = {}

    def on_bind(self, slot: PciAddress) -> None:
        """Show a function to which its native driver was bound."""
        function = self._functions[slot]
        is_gpu = kind_of(function.class_code, function.id.vendor) is FunctionKind.GPU and function.physfn is None
        if function.driver == "nvidia" and function.id.vendor == NVIDIA and is_gpu:
            minor = self._minors.setdefault(slot, len(self._minors))
            lock = File(read=lambda: f"{int(slot in self._locked)}\n", write=lambda text: self._lock(slot, text))
            information = INFORMATION.format(model=function.model, uuid=gpu_uuid(slot), slot=slot, minor=minor)
            self._tree.place(HostPath(f"{GPUS}/{slot}/information"), constant(information))
            self._tree.place(HostPath(f"{GPUS}/{slot}/unbindLock"), lock)
            self._tree.place(HostPath(f"/dev/nvidia{minor}"), DeviceNode(MAJOR << 8 | minor))
        self._inner.on_bind(slot)

    def on_unbind(self, slot: PciAddress, finish: Callable[[], None]) -> None:
        """Prepare a function for the unbinding of its driver; call `finish` when it is not in use any more."""

        def gone() -> None:
            self._clear(slot)
            finish()

        if self._has(slot) and self._is_open(self._node(slot)):
            self._waiting[slot] = lambda: self._inner.on_unbind(slot, gone)
        else:
            self._inner.on_unbind(slot, gone)

    def on_unplug(self, slot: PciAddress) -> None:
        """Remove an unplugged function."""
        self._clear(slot)
        self._inner.on_unplug(slot)

    def closed(self) -> None:
        """Continue the unbindings that waited for a GPU that no process has open any more."""
        for slot in [slot for slot in self._waiting if not self._is_open(self._node(slot))]:
            self._waiting.pop(slot)()

    def is_open(self, slot: PciAddress) -> bool:
        """Return whether a process has a GPU open."""
        return slot in self._minors and self._is_open(self._node(slot))

    def is_locked(self, slot: PciAddress) -> bool:
        """Return whether a GPU's unbindLock is taken, so that no process can open the GPU."""
        return slot in self._locked

    def nodes_of(self, slot: PciAddress) -> tuple[str, ...]:
        """Return the node of a GPU on this driver, `/dev/nvidia0`."""
        return (self._node(slot),) if self._has(slot) else ()

    def lock(self, slot: PciAddress) -> bool:
        """Take a GPU's unbindLock by writing 1, and return whether it reads 1."""
        self._lock(slot, "1")
        return slot in self._locked

    def _has(self, slot: PciAddress) -> bool:
        return self._tree.exists(HostPath(f"{GPUS}/{slot}"))

    def _node(self, slot: PciAddress) -> str:
        return f"/dev/nvidia{self._minors[slot]}"

    def _lock(self, slot: PciAddress, text: str) -> None:
        if not written.number(text):
            self._locked.discard(slot)
        elif not self._is_open(self._node(slot)):
            self._locked.add(slot)

    def _clear(self, slot: PciAddress) -> None:
        if self._has(slot):
            self._locked.discard(slot)
            self._tree.remove(HostPath(f"{GPUS}/{slot}"))
            self._tree.remove(HostPath(self._node(slot)))
