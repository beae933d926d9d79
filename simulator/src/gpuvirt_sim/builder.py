"""Builds a simulated host from its host file."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import (
    IommuGroup,
    PciAddress,
    VgpuType,
    parse_mdev_uuid,
    parse_pci_address,
    parse_pci_id,
    slot_of,
)
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt.paths import HostPath
from gpuvirt_sim.carrying import carry
from gpuvirt_sim.devices.function import SimFunction, VfIdentity
from gpuvirt_sim.devices.platform import place_platform
from gpuvirt_sim.devices.vfs import Carrier
from gpuvirt_sim.devices.vgpu import SimVgpuHost, VgpuTypeSpec
from gpuvirt_sim.files.tree import DeviceNode, constant
from gpuvirt_sim.hostspec import CardSpec, EgmSpec, FunctionSpec, HostSpec, SlotSpec, shared_cards
from gpuvirt_sim.kernel import SimKernel

UUID_SPACE = uuid.UUID("6f9a2c4e-55a0-4d0e-9a44-2f0c5a6b7d10")
"""The UUIDs of simulated mdevs derive from their parent and number, so that every run has the same."""

EGM_MAJOR = 509
VFIO = "vfio-pci"


def build_host(spec: HostSpec, *, where: str = "host", wait: bool = False) -> SimKernel:
    """Return the simulated kernel of a host; raise ConfigError where the host file is inconsistent.

    `wait` makes callers sleep where the kernel would block them, for simulators that have a thread for each caller.
    """
    kernel = SimKernel(iommufd=spec.iommufd, group_nodes=spec.group_nodes, wait=wait)
    kernel.vfio.vfio_dev = spec.vfio_dev
    if spec.cdev_nodes is not None:
        kernel.vfio.cdev_nodes = spec.cdev_nodes
    return _Builder(spec, where, kernel).build()


class _Builder:
    """One simulated host during its construction, slot by slot."""

    def __init__(self, spec: HostSpec, where: str, kernel: SimKernel) -> None:
        self.spec = spec
        self.where = where
        self.kernel = kernel
        self.boards = shared_cards() | spec.boards
        last_group = max((slot.group for slot in spec.slots if slot.group is not None), default=0)
        kernel.vfs.next_group = 1 + last_group if spec.iommu else None

    def build(self) -> SimKernel:
        if self.spec.vfio_loaded:
            self.kernel.vfio.load()
        modules = self.spec.platform.modules
        uses_vfio_pci = modules is None or "vfio_pci" in modules or any(slot.driver == VFIO for slot in self.spec.slots)
        for driver in (*([VFIO] if uses_vfio_pci else ()), "nvidia", "pcieport"):
            self.kernel.pci.add_driver(driver)
        for index, slot in enumerate(self.spec.slots):
            with self._located("slot", f"$.slots[{index}]"):
                self._reserve_cdevs(slot)
        for index, slot in enumerate(self.spec.slots):
            with self._located("slot", f"$.slots[{index}]"):
                self._add(slot)
        for index, slot in enumerate(self.spec.slots):
            if slot.carries is not None:
                with self._located("slot", f"$.slots[{index}].carries"):
                    carry(self.kernel, parse_pci_address(slot.at), slot.carries)
        for number, region in enumerate(self.spec.egm):
            with self._located("region", f"$.egm[{number}]"):
                self._add_region(region, number)
        for group in self.spec.missing_nodes:
            self.kernel.delete_node(IommuGroup(group))
        for group in self.spec.stray_nodes:
            self.kernel.vfio.show_node(IommuGroup(group))
        with self._located("platform", "$.platform"):
            has_manager = bool(self.kernel.vfs.carriers)
            place_platform(
                self.kernel.tree, self.kernel.pci, self.spec.platform, iommu=self.spec.iommu, has_manager=has_manager
            )
        return self.kernel

    @contextmanager
    def _located(self, what: str, path: str) -> Iterator[None]:
        """Turn errors into a ConfigError that names the place in the host file."""
        try:
            yield
        except (ValueError, KeyError, OSError) as error:
            message = f"no {error} among the slots above" if isinstance(error, KeyError) else error
            raise ConfigError(f"this {what} can't be built: {message}", where=self.where, path=path) from error

    def _add_region(self, region: EgmSpec, number: int) -> None:
        folder = HostPath(f"/sys/class/egm/{region.name}")
        if self.kernel.tree.exists(folder):
            raise ValueError(f"{region.name} is listed twice")
        gpus = "\n".join(parse_pci_address(gpu) for gpu in region.gpus)
        self.kernel.tree.place(HostPath(f"{folder}/gpu_devices"), constant(gpus))
        self.kernel.tree.place(HostPath(f"/dev/{region.name}"), DeviceNode(EGM_MAJOR << 8 | number))

    def _reserve_cdevs(self, slot: SlotSpec) -> None:
        """Reserve the numbers of VFIO devices that the host file gives, before other devices take them."""
        if slot.cdev is not None:
            self.kernel.vfio.reserve_index(parse_pci_address(slot.at), slot.cdev)
        for live in slot.carries.live if slot.carries is not None else ():
            if live.cdev is not None:
                self.kernel.vfio.reserve_index(parse_mdev_uuid(live.uuid or ""), live.cdev)

    def _add(self, slot: SlotSpec) -> None:
        if slot.board not in self.boards:
            near = nearest(slot.board, self.boards)
            hint = f"; did you mean {near}?" if near else ""
            raise ValueError(f"no board {slot.board!r}; the boards are {', '.join(sorted(self.boards))}{hint}")
        board, first = self.boards[slot.board], parse_pci_address(slot.at)
        if slot.vfs > (board.total_vfs or 0):
            raise ValueError(f"{slot.vfs} VFs are requested, but board {slot.board} has {board.total_vfs or 0}")
        for number in range(len(board.functions)):
            self._add_function(slot, board, self._free(f"{slot_of(first)}.{int(first[-1]) + number}"), number)
        function = self.kernel.pci.functions[first]
        vfs = [self.kernel.vfs.add(function, number) for number in range(slot.vfs)]
        if slot.carries is not None:
            if slot.vgpus or slot.vgpu_types:
                raise ValueError("carries replaces vgpus and vgpu_types; expected one or the other")
            return
        types = slot.vgpu_types or board.vgpu_types
        # A GPU that starts on another driver is on a host whose `nvidia` driver does not make vGPUs.
        if types and slot.vf_of is None and slot.vgpu is None and function.driver == "nvidia":
            self._carry(slot, board, SimVgpuHost(first, types, vfs or ([] if board.vgpus_on_vfs else [first])))
        elif slot.vgpus:
            raise ValueError("vGPUs need the driver nvidia, and a board that lists their types")

    def _carry(self, slot: SlotSpec, board: CardSpec, vgpu_host: SimVgpuHost) -> None:
        """Switch a GPU to its mode, and create its vGPUs."""
        if board.vgpus is None or board.vgpus is Framework.SRIOV_VF:
            raise ValueError(f"board {slot.board} has vGPU types, but no framework that creates them")
        if not slot.vgpu_types:
            vgpu_host.profiles = board.mig_profiles
        vgpu_host.mixed_sizes, vgpu_host.mig = slot.mixed_sizes, bool(slot.mig)
        vgpu_host.mig_pending = vgpu_host.mig
        if vgpu_host.mixed_sizes and not vgpu_host.can_mix_sizes:
            raise ValueError(f"board {slot.board} lists no placements of vGPUs for mixed-size mode")
        profiles = {profile.name: profile for profile in vgpu_host.profiles}
        for name, count in slot.mig.items():
            for made in range(count):
                if vgpu_host.add_instance(profiles[name]) is None:
                    raise ValueError(f"{count} GPU instances {name} don't fit, only {made} do")
        self.kernel.vfs.offer(Carrier(vgpu_host, board.vgpus, on_vfs=board.vgpus_on_vfs))
        for name, vgpus in slot.vgpus.items():
            self._create_vgpus(vgpu_host, board, name, vgpus)

    def _free(self, text: str) -> PciAddress:
        """Return an address at which there is no function yet."""
        address = parse_pci_address(text)
        if address in self.kernel.pci.functions:
            raise ValueError(f"there is a function at {address} already")
        return address

    def _existing(self, text: str) -> PciAddress:
        """Return the address of a function that exists; raise KeyError for another."""
        address = parse_pci_address(text)
        if address not in self.kernel.pci.functions:
            raise KeyError(text)
        return address

    def _add_function(self, slot: SlotSpec, board: CardSpec, address: PciAddress, number: int) -> None:
        part = board.functions[number]
        function = SimFunction(
            address=address,
            id=parse_pci_id(part.id),
            class_code=int(part.class_code, 16),
            folder=self._folder(address, slot.behind),
            subsystem=parse_pci_id(part.subsystem) if part.subsystem else None,
            revision=int(part.revision, 16) if part.revision is not None else None,
            group=self._group(slot),
            numa_node=slot.numa,
            native_driver=part.native_driver,
            total_vfs=board.total_vfs if number == 0 else None,
            vf=self._vf(board, part),
            takes_numvfs=board.numvfs,
            fell_off_bus=slot.fell_off_bus,
            model=slot.vgpu or board.product,
            physfn=self._existing(slot.vf_of) if slot.vf_of is not None else None,
        )
        self.kernel.pci.add(function)
        driver = {"native": part.native_driver, "none": None}.get(slot.driver or "none", slot.driver)
        if driver is not None:
            self.kernel.pci.bind(function, driver)  # without an override, as after a write to new_id at boot

    def _vf(self, board: CardSpec, part: FunctionSpec) -> VfIdentity:
        """Return the identity of a board's VFs; where their class differs from the GPU's, no driver binds to them."""
        return VfIdentity(
            parse_pci_id(board.vf_id or part.id),
            int(board.vf_class or part.class_code, 16),
            part.native_driver if board.vf_class is None else None,
        )

    def _group(self, slot: SlotSpec) -> IommuGroup | None:
        return IommuGroup(slot.group) if self.spec.iommu and slot.group is not None else None

    def _folder(self, address: PciAddress, behind: str | None) -> HostPath:
        if behind is not None:
            return HostPath(f"{self.kernel.pci.functions[parse_pci_address(behind)].folder}/{address}")
        domain, bus, _ = address.split(":")
        return HostPath(f"/sys/devices/pci{domain}:{bus}/{address}")

    def _create_vgpus(self, vgpu_host: SimVgpuHost, board: CardSpec, name: VgpuType, count: int) -> None:
        spec = next((spec for spec in vgpu_host.types if spec.name == name), None)
        if spec is None:
            raise ValueError(f"no vGPU type {name!r}; there are {', '.join(spec.name for spec in vgpu_host.types)}")
        for made in range(count):
            slot = next((slot for slot in vgpu_host.slots if vgpu_host.left(spec, slot) > 0), None)
            if slot is None:
                raise ValueError(
                    f"{count} x {name} don't fit, only {made} do: a GPU carries one size of vGPUs, {spec.most} of this"
                )
            self._create_vgpu(vgpu_host, board, spec, slot)

    def _create_vgpu(self, vgpu_host: SimVgpuHost, board: CardSpec, spec: VgpuTypeSpec, slot: PciAddress) -> None:
        if board.vgpus is Framework.MDEV:
            self.kernel.mdev.create(vgpu_host, slot, spec, str(uuid.uuid5(UUID_SPACE, f"{slot} {len(vgpu_host.live)}")))
        else:
            self.kernel.write(HostPath(f"/sys/bus/pci/devices/{slot}/nvidia/current_vgpu_type"), str(spec.id).encode())
            self.kernel.writes.clear()
