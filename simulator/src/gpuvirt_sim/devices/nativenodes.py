"""The device nodes that native drivers other than NVIDIA's create for their functions, and who loses them.

The folders and numbers are those of Linux 6.1. A driver is unbound although processes have its nodes open: graphics,
USB and input devices are then gone for their processes (drm_dev_unplug, usbdev_remove), which keep a file of a deleted
node. Unbinding sound and I2C devices also waits until their files are closed (snd_card_free, i2c_del_adapter).
"""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import msgspec

from gpuvirt.facts.ids import PciAddress
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.drivers import DriverObjects
from gpuvirt_sim.devices.function import SimFunction
from gpuvirt_sim.files.processes import Process, Processes
from gpuvirt_sim.files.tree import DeviceNode, Tree, constant

ACCEL, AUX, DRM, EVENT, HWMON, I2C = "accel", "drm_dp_aux_dev", "drm", "input", "hwmon", "i2c-dev"
RENDER, SOUND, USB, XCP = "render", "sound", "usb", "amdgpu_xcp"
ACCEL_MAJOR, DRM_MAJOR, INPUT_MAJOR, I2C_MAJOR, SOUND_MAJOR, USB_MAJOR = 261, 226, 13, 89, 116, 189
"""Documentation/admin-guide/devices.txt, include/drm/drm_accel.h"""
PLATFORM = "/sys/devices/platform"
AUX_MAJOR = 508
"""A dynamic major (drm_dp_aux_dev_init)."""
FIRST_RENDER, FIRST_EVENT = 128, 64
SOUND_MINORS, HWDEP_MINOR, PLAYBACK_MINOR = 32, 4, 16
"""The minors of a sound card, and the first ones of its kinds of devices (include/sound/minors.h)."""
USB_MINORS = 128
HDMI = 3
"""The number of the first HDMI output of a graphics card's sound card."""
DISPLAY, ACCELERATOR = 0x0300, 0x1200
"""The classes of graphics cards with outputs, and of accelerators; 0302 and others have no outputs."""
PARTITIONS = 8
"""The partitions of an AMD accelerator in mode CPX (MAX_XCP); the first has the nodes of the GPU itself."""

Take = Callable[[str], int]
"""Takes the lowest free number of a kind of device."""


class NativeNode(msgspec.Struct, frozen=True):
    """A device node of a function."""

    folder: str
    """The folder of the device below the function's, or its whole path: `drm/card0`."""
    path: str
    """The node: `/dev/dri/card0`."""
    number: int
    waits: bool = False
    """Whether the driver is not unbound until no process has the node open."""


class UnbindInUse(msgspec.Struct, frozen=True):
    """A driver that was unbound while a process had a node of the function open."""

    address: PciAddress
    driver: str
    node: str
    process: Process


def _graphics(function: SimFunction, take: Take) -> Iterator[NativeNode]:
    card = take(DRM)
    if function.driver != "ast":
        render = FIRST_RENDER + take(RENDER)
        yield NativeNode(f"drm/renderD{render}", f"/dev/dri/renderD{render}", os.makedev(DRM_MAJOR, render))
    yield NativeNode(f"drm/card{card}", f"/dev/dri/card{card}", os.makedev(DRM_MAJOR, card))
    if function.driver != "ast" and function.class_code >> 8 == DISPLAY:
        output, aux, bus = f"drm/card{card}/card{card}-DP-1", take(AUX), take(I2C)
        yield NativeNode(f"{output}/drm_dp_aux{aux}", f"/dev/drm_dp_aux{aux}", os.makedev(AUX_MAJOR, aux))
        yield _i2c(f"{output}/i2c-{bus}", bus)


def _amdgpu(function: SimFunction, take: Take) -> Iterator[NativeNode]:
    """Yield the nodes of a GPU, and of an accelerator's partitions, which are below platform devices."""
    yield from _graphics(function, take)
    for _ in range(PARTITIONS - 1 if function.class_code >> 8 == ACCELERATOR else 0):
        platform, render = f"{PLATFORM}/amdgpu_xcp_{take(XCP)}", FIRST_RENDER + take(RENDER)
        number = os.makedev(DRM_MAJOR, render)
        yield NativeNode(f"{platform}/drm/renderD{render}", f"/dev/dri/renderD{render}", number)


def _i2c(folder: str, bus: int) -> NativeNode:
    return NativeNode(f"{folder}/i2c-dev/i2c-{bus}", f"/dev/i2c-{bus}", os.makedev(I2C_MAJOR, bus), waits=True)


def _accelerator(function: SimFunction, take: Take) -> Iterator[NativeNode]:
    del function
    number = take(ACCEL)
    yield NativeNode(f"accel/accel{number}", f"/dev/accel/accel{number}", os.makedev(ACCEL_MAJOR, number))


def _sound_card(function: SimFunction, take: Take) -> Iterator[NativeNode]:
    del function
    card, event = take(SOUND), take(EVENT)
    parts = {f"controlC{card}": 0, f"pcmC{card}D{HDMI}p": PLAYBACK_MINOR + HDMI, f"hwC{card}D0": HWDEP_MINOR}
    for name, minor in parts.items():
        number = os.makedev(SOUND_MAJOR, card * SOUND_MINORS + minor)
        yield NativeNode(f"sound/card{card}/{name}", f"/dev/snd/{name}", number, waits=True)
    jack = os.makedev(INPUT_MAJOR, FIRST_EVENT + event)
    yield NativeNode(f"sound/card{card}/input{event}/event{event}", f"/dev/input/event{event}", jack)


def _usb_controller(function: SimFunction, take: Take) -> Iterator[NativeNode]:
    del function
    for bus in (take(USB) + 1, take(USB) + 1):  # one for USB 2 and one for USB 3
        yield NativeNode(f"usb{bus}", f"/dev/bus/usb/{bus:03}/001", os.makedev(USB_MAJOR, (bus - 1) * USB_MINORS))


def _usb_c(function: SimFunction, take: Take) -> Iterator[NativeNode]:
    del function
    bus = take(I2C)
    yield _i2c(f"i2c-{bus}", bus)


_NODES: Mapping[str, Callable[[SimFunction, Take], Iterator[NativeNode]]] = {
    **dict.fromkeys(("ast", "i915", "nouveau", "xe"), _graphics),
    **dict.fromkeys(("habanalabs", "intel_vpu"), _accelerator),
    "amdgpu": _amdgpu,
    "nvidia-gpu": _usb_c,
    "snd_hda_intel": _sound_card,
    "xhci_hcd": _usb_controller,
}
_SENSORS = frozenset({"amdgpu", "nouveau", "xe"})
"""The drivers whose functions have a folder of sensors, without a node."""


class NativeNodes:
    """The nodes of all functions on these drivers; `inner` has the objects of NVIDIA's driver."""

    def __init__(
        self, tree: Tree, functions: Mapping[PciAddress, SimFunction], processes: Processes, inner: DriverObjects
    ) -> None:
        self.unbound_in_use: list[UnbindInUse] = []
        """The processes that had a node open when its driver was unbound. Each has lost its device."""
        self._tree = tree
        self._functions = functions
        self._processes = processes
        self._inner = inner
        self._nodes: dict[PciAddress, tuple[NativeNode, ...]] = {}
        self._folders: dict[PciAddress, HostPath] = {}
        self._taken: dict[str, set[int]] = {}
        self._numbers: dict[PciAddress, list[tuple[str, int]]] = {}
        """The numbers of a function's devices, such as 1 of the kind drm."""
        self._lingering: list[tuple[tuple[NativeNode, ...], list[tuple[str, int]]]] = []
        """Nodes that were removed, with their numbers, which stay taken while a process has the node open."""
        self._waiting: list[tuple[tuple[NativeNode, ...], Callable[[], None]]] = []

    def of(self, address: PciAddress) -> tuple[str, ...]:
        """Return the nodes of a function, such as `/dev/dri/renderD128`."""
        return tuple(node.path for node in self._nodes.get(address, ()))

    def on_bind(self, slot: PciAddress) -> None:
        """Create the nodes of a function."""
        function = self._functions[slot]
        create = _NODES.get(function.driver or "")
        if create is not None:
            self._free_numbers()
            self._folders[slot] = function.folder
            self._nodes[slot] = tuple(create(function, partial(self._take, slot)))
            for node in self._nodes[slot]:
                self._place(function, node)
            if function.driver in _SENSORS:
                sensors = f"{function.folder}/{HWMON}/hwmon{self._take(slot, HWMON)}"
                self._tree.place(HostPath(f"{sensors}/name"), constant(function.driver or ""))
        self._inner.on_bind(slot)

    def on_unbind(self, slot: PciAddress, finish: Callable[[], None]) -> None:
        """Remove the nodes of a function, open or not; call `finish` when no file keeps its driver from it."""
        nodes, driver = self._nodes.get(slot, ()), self._functions[slot].driver or ""
        self.unbound_in_use += [
            UnbindInUse(slot, driver, node.path, process)
            for node in nodes
            for process in self._processes.having_open(node.path)
        ]
        self._remove(slot)
        waited = tuple(node for node in nodes if node.waits)
        self._waiting.append((waited, partial(self._inner.on_unbind, slot, finish)))
        self.closed()

    def on_unplug(self, slot: PciAddress) -> None:
        """Remove the nodes of an unplugged function."""
        self._remove(slot)
        self._inner.on_unplug(slot)

    def closed(self) -> None:
        """Continue the unbindings that waited for files that are closed now."""
        waiting, self._waiting = self._waiting, []
        for nodes, finish in waiting:
            if any(self._is_open(node) for node in nodes):
                self._waiting.append((nodes, finish))
            else:
                finish()

    def _take(self, slot: PciAddress, kind: str) -> int:
        taken = self._taken.setdefault(kind, set())
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        taken.add(number)
        self._numbers.setdefault(slot, []).append((kind, number))
        return number

    def _place(self, function: SimFunction, node: NativeNode) -> None:
        folder, class_folder = _folder(function.folder, node), _class_folder(node)
        major, minor = os.major(node.number), os.minor(node.number)
        name = node.path.removeprefix("/dev/")
        self._tree.place(HostPath(f"{folder}/dev"), constant(f"{major}:{minor}"))
        self._tree.place(HostPath(f"{folder}/uevent"), constant(f"MAJOR={major}\nMINOR={minor}\nDEVNAME={name}"))
        self._tree.link(HostPath(f"{folder}/subsystem"), HostPath(class_folder.removesuffix("/devices")))
        if node.folder.count("/") == 1:
            self._tree.link(HostPath(f"{folder}/device"), function.folder)
        self._tree.link(HostPath(f"{class_folder}/{_name(node)}"), HostPath(folder))
        self._tree.place(HostPath(node.path), DeviceNode(node.number))

    def _remove(self, slot: PciAddress) -> None:
        """Remove the nodes of a function; its numbers are free when no process has a file of them open."""
        nodes = self._nodes.pop(slot, ())
        for node in nodes:
            self._processes.delete_node(node.path, node.number)
            self._tree.remove(HostPath(f"{_class_folder(node)}/{_name(node)}"))
            self._tree.remove(HostPath(node.path))
            if node.folder.startswith(PLATFORM):
                self._tree.remove(HostPath("/".join(node.folder.split("/")[:5])))
        for name in {node.folder.partition("/")[0] for node in nodes if not node.folder.startswith(PLATFORM)} | (
            {HWMON} if nodes else set()
        ):
            self._tree.remove(HostPath(f"{self._folders[slot]}/{name}"))
        self._lingering.append((nodes, self._numbers.pop(slot, [])))
        self._free_numbers()

    def _free_numbers(self) -> None:
        lingering, self._lingering = self._lingering, []
        for nodes, numbers in lingering:
            if any(self._is_open(node) for node in nodes):
                self._lingering.append((nodes, numbers))
                continue
            for kind, number in numbers:
                self._taken[kind].discard(number)

    def _is_open(self, node: NativeNode) -> bool:
        """Return whether a process has a node open that was removed."""
        return self._processes.has_deleted(node.number)


def _folder(function: HostPath, node: NativeNode) -> str:
    return node.folder if node.folder.startswith(PLATFORM) else f"{function}/{node.folder}"


def _name(node: NativeNode) -> str:
    return node.folder.rpartition("/")[2]


def _class_folder(node: NativeNode) -> str:
    name = _name(node)
    if name.startswith("usb"):
        return "/sys/bus/usb/devices"
    if node.folder.startswith(PLATFORM):
        return f"/sys/class/{DRM}"
    if node.folder.count("/") == 1:
        return f"/sys/class/{node.folder.partition('/')[0]}"
    kinds = {"drm_dp_aux": AUX, "event": EVENT, "i2c": I2C}
    return "/sys/class/" + next((kind for start, kind in kinds.items() if name.startswith(start)), SOUND)
