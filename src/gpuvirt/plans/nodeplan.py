"""Plans the effect of a workload and a vGPU config on a node, with the agent's own planning functions."""

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType, parse_pci_address, parse_pci_id
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.sysfs import device_path
from gpuvirt.facts.vgpu import Framework, LiveVgpu, VgpuHost
from gpuvirt.kube.kinds.gpunode import READY, Gpu, GpuNode, Planning, Spec, Status
from gpuvirt.model.allocation.launcherpods import user_texts
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.driverplanning import drivers_of
from gpuvirt.model.change.nodevgpus import DesiredConfig, NodeVgpus, SmiMemory, VgpuDemand, plan_node_vgpus
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.steps import CreateVgpu, EnableVfs, RemoveVgpu
from gpuvirt.model.change.vgpus import modes
from gpuvirt.model.change.vgpus.desiredvgpus import ConfigName, ConfigSet
from gpuvirt.model.change.vgpus.gpustate import NAMESPACE, GpuState, Holding, gpu_state_of
from gpuvirt.model.change.vgpus.vgpuplanning import plan_gpu
from gpuvirt.model.desired.gpumodes import FOR_CONTAINERS, DesiredMode, Modes
from gpuvirt.model.inventory.inventory import Inventory, Mode, build_inventory
from gpuvirt.model.offers.ondemand.offer import Carried, carried_by, room
from gpuvirt.model.reasons import Reason
from gpuvirt.model.reasons.refusals import BEING_ADMITTED
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.profiles import profile_name


# A GpuNode counts a GPU's VFs and does not name them, so they get addresses of their own here, which no output has.
class Reported(msgspec.Struct, frozen=True):
    """The GPUs of a node as the planner takes them."""

    inventory: Inventory
    holdings: tuple[Holding, ...]
    unplanned: tuple[PciAddress, ...]
    """The GPUs for which an older agent does not report the inputs of a plan."""


def reported(gpus: tuple[Gpu, ...]) -> Reported:
    """Return the reported GPUs; VFs and other functions among them are left out."""
    found = {parse_pci_address(gpu.address): gpu for gpu in gpus}
    planned = {address: (gpu, gpu.planning) for address, gpu in found.items() if gpu.planning is not None}
    functions = {address: _function(address, gpu, planning) for address, (gpu, planning) in planned.items()}
    hosts = {
        address: host
        for address, (gpu, planning) in planned.items()
        if (host := _host(address, gpu, planning)) is not None
    }
    return Reported(
        build_inventory(Facts(functions=functions, vgpu_hosts=hosts, users={})),
        tuple(holding for gpu in found.values() for holding in _holdings(gpu)),
        tuple(sorted(address for address, gpu in found.items() if gpu.planning is None)),
    )


def assumed_host(function: PciFunction) -> VgpuHost | None:
    """Return the vGPUs that a GPU carries by the catalog, once its driver lists types; None for an unknown card."""
    cards = catalog.cards_of(function.id, function.subsystem)
    if len(cards) != 1:
        return None
    types = {VgpuType(card_type.profile.text): card_type.most for card_type in cards[0].types()}
    return VgpuHost(function.address, Framework.MDEV, creatable={function.address: types})


def _function(address: PciAddress, gpu: Gpu, planning: Planning) -> PciFunction:
    unread = gpu.mode == Mode.UNKNOWN
    on_vfio = gpu.mode == Mode.PASSTHROUGH
    return PciFunction(
        address,
        id=parse_pci_id(planning.pci_id),
        class_code=planning.class_code,
        subsystem=parse_pci_id(planning.subsystem_id) if planning.subsystem_id else None,
        driver=Unread(device_path(address, "driver")) if unread else gpu.driver,
        cdevs=("reported",) if on_vfio else (),
        virtfns=tuple(_vf(address, number) for number in range(gpu.vfs or 0)),
        sriov_total_vfs=planning.total_vfs,
    )


def _vf(address: PciAddress, number: int) -> PciAddress:
    return PciAddress(f"{address}-vf{number:04}")


def _host(address: PciAddress, gpu: Gpu, planning: Planning) -> VgpuHost | None:
    if planning.framework is None or planning.framework is Framework.SRIOV_VF:
        return None
    types = {VgpuType(vgpu_type.name): vgpu_type.creatable for vgpu_type in planning.types}
    parents = planning.parents
    live = tuple(
        LiveVgpu(
            VgpuId(vgpu.id),
            Unread(device_path(address), seen=vgpu.type) if vgpu.type == "unknown" else VgpuType(vgpu.type),
            address if parents is None else _vf(address, number),
            group=None,
        )
        for number, vgpu in enumerate(gpu.vgpus)
    )
    creatable: Mapping[PciAddress, Mapping[VgpuType, int]] = {address: types}
    if parents is not None:
        free = range(len(live), max(parents, len(live)))
        creatable = {vgpu.parent: {} for vgpu in live}
        creatable |= {
            _vf(address, number): {name: 1 for name, left in types.items() if number - len(live) < left}
            for number in free
        }
    names: dict[str, VgpuType] = {str(name): name for name in types}
    return VgpuHost(address, planning.framework, creatable=creatable, live=live, type_names=names)


def _holdings(gpu: Gpu) -> Iterator[Holding]:
    for vgpu in gpu.vgpus:
        for user in vgpu.users:
            yield Holding(PciAddress(gpu.address), VgpuId(vgpu.id), VgpuType(vgpu.type), user, seen_this_boot=True)


PODS = ("pod ", BEING_ADMITTED)
"""The beginnings of the users that are pods."""
WHOLE = "GPU"
"""The type of a VM that gets a whole GPU."""
UNITS = "the units of a GPU, once it is shared: 1000 unless the settings differ, fewer for a vGPU"
NO_REPORT = "its agent has not reported yet"
NO_AGENT = (
    "it is for containers, so no agent has read its GPUs; label it first, or plan on the node itself: gpuvirt vgpu"
    " apply --dry-run, gpuvirt vfio bind --dry-run. gpuvirt install check shows what runs on which node"
)
OLD_AGENT = (
    "its agent does not report the inputs of a plan; expected an agent and a kind GpuNode of this version or newer"
)
NEEDS_SMI = "nvidia-smi on the node decides (MIG mode, sizes, scheduler), so the vGPUs are those of the config"
SMI_COUNTS = "nvidia-smi on the node decides how many vGPUs fit (MIG mode, sizes)"
BY_CATALOG = (
    "its driver lists vGPU types only after this change; the vGPUs are those that its card carries by the catalog, with"
    " NVIDIA's vGPU manager"
)
MIXED_MODE = "fewer fit if the GPU is in mixed-size mode, which nvidia-smi on the node reports"
NO_DRIVER = "it has no driver now; the node alone shows whether a native driver can be loaded"
HOST_ONLY = "modules, other functions of its IOMMU group and processes of the host are checked by the agent alone"
OTHER_PLUGINS = "pods that have the GPU from another device plugin are known to the agent alone"
NO_CARD = "the catalog does not decide which card it is, and its driver lists vGPU types only after this change"


class GpuPlan(msgspec.Struct, frozen=True):
    """The plan for one GPU: its state now, and the changes that would follow."""

    address: str
    name: str | None
    mode: str
    """The mode now, by its driver."""
    desired_mode: str
    """The mode that it would have."""
    vgpus: Mapping[str, int]
    """The vGPUs that it carries now, by type as in configs."""
    vgpus_then: Mapping[str, int] | None
    """The vGPUs that it would carry while the users stay; None where that is not known."""
    in_the_way: tuple[str, ...]
    """The VMs, other pods and processes that keep the GPU, or vGPUs that would go."""
    reasons: tuple[str, ...]
    """Why the agent would refuse the change, or wait."""
    unknown: tuple[str, ...]
    """The facts that only the node can show."""
    changes: bool
    fits: Mapping[str, int] | None
    """How many more VMs would fit, by vGPU type, `GPU` for the whole GPU; None where that is not known."""
    one_of: bool
    """Whether the types in `fits` are alternatives: in mode on-demand the first vGPU sets the size of all."""
    units: int | None = None
    """The units that pods could get of it in mode shared; None in another mode, or where the agent alone knows them."""


class NodePlan(msgspec.Struct, frozen=True):
    """The plan for one node: the changes that would follow. Its JSON is a contract (docs/reference/json.md)."""

    node: str
    mode: str
    vgpu_config: str | None
    gpus: tuple[GpuPlan, ...]
    problem: str | None
    """Why the vGPU config would be invalid there, and change nothing."""
    unknown: tuple[str, ...]
    """The facts about the node as a whole that are not known."""

    @property
    def is_refused(self) -> bool:
        """Whether the change would be refused, would wait for a user, or is not known."""
        return bool(self.problem or self.unknown) or any(
            gpu.reasons or gpu.in_the_way or gpu.fits is None for gpu in self.gpus
        )


def plan_node(gpu_node: GpuNode, mode: DesiredMode, config: ConfigName | None, config_set: ConfigSet) -> NodePlan:
    """Return what the mode and the vGPU config would change; modes of single GPUs in the spec stay."""
    status, spec = gpu_node.status or Status(), gpu_node.spec or Spec()
    gpus = {PciAddress(gpu.address): gpu for gpu in status.gpus}
    found, plans, modes = _plans(gpu_node, mode, config, config_set)
    problem = plans.desired_types.problem
    invalid = (*((problem,) if problem is not None else ()), *plans.invalid)
    planning = _Planning(found, plans, modes)
    return NodePlan(
        gpu_node.metadata.name,
        mode,
        config.name if config is not None else None,
        tuple(planning.of(gpus[address]) for address in sorted(found.inventory.gpus)),
        "; ".join(dict.fromkeys(value.reason.text for value in invalid)) or None,
        tuple(_unreported(gpu_node.metadata.name, spec.mode, status, found)),
    )


def _unreported(node: str, mode: DesiredMode, status: Status, found: Reported) -> Iterator[str]:
    if not status.gpus and all(condition.type != READY for condition in status.conditions):
        yield f"{node}: {NO_AGENT if mode is DesiredMode.CONTAINER else NO_REPORT}"
    yield from (f"{address}: {OLD_AGENT}" for address in found.unplanned)


def types_of(gpu_node: GpuNode, config: ConfigName, config_set: ConfigSet) -> frozenset[str]:
    """Return the vGPU types that a config gives the GPUs of a node, even while others are in use."""
    mode = gpu_node.spec.mode if gpu_node.spec is not None else DesiredMode.UNMANAGED
    _, plans, _ = _plans(gpu_node, mode, config, config_set)
    desired = (found.vgpus for found in plans.desired.values() if found.vgpus is not None)
    return frozenset(name for vgpus in desired for name, count in vgpus.types.items() if count)


def _plans(
    gpu_node: GpuNode, mode: DesiredMode, config: ConfigName | None, config_set: ConfigSet
) -> tuple[Reported, NodeVgpus, Modes]:
    status, spec = gpu_node.status or Status(), gpu_node.spec or Spec()
    found = reported(status.gpus)
    modes = Modes(mode, {gpu.address: gpu.mode for gpu in spec.gpus})
    drivers = drivers_of(modes, found.inventory.gpus)
    demand = VgpuDemand(DesiredConfig(config_set, config), modes, drivers, found.holdings, {})
    return found, plan_node_vgpus(found.inventory, demand, SmiMemory()), modes


class _Planning(msgspec.Struct, frozen=True):
    """The plans of one node."""

    found: Reported
    plans: NodeVgpus
    modes: Modes

    def of(self, gpu: Gpu) -> GpuPlan:
        """Return what would change on a GPU."""
        address = PciAddress(gpu.address)
        function = self.found.inventory.facts.functions[address]
        mode = self.modes.of(address)
        now = Counter(profile_name(vgpu.type) for vgpu in gpu.vgpus)
        outcome = self._outcome(gpu, function, now)
        moves = _moves(gpu, mode)
        changes = moves or outcome.changes or bool(self.plans.plan_of(address).steps)
        # Pods prevent every step, as in `change.planner`; processes with its IOMMU group open only another driver.
        users = user_texts(user for user in gpu.users if moves or (changes and user.startswith(PODS)))
        if users:
            outcome = _Outcome(now)
        way = tuple(dict.fromkeys((*users, *outcome.in_the_way)))
        return GpuPlan(
            address=gpu.address,
            name=gpu.name,
            mode=gpu.mode,
            desired_mode=mode,
            vgpus=dict(now),
            vgpus_then=outcome.vgpus,
            in_the_way=way,
            reasons=outcome.reasons,
            unknown=tuple(self._unknown(gpu, function, outcome, changes=changes)),
            changes=(moves and not users) or outcome.changes,
            fits=self._fits(gpu, function, outcome, blocked=bool(users)),
            one_of=mode is DesiredMode.ON_DEMAND,
            units=(0 if way or outcome.reasons else gpu.units) if mode is DesiredMode.SHARED else None,
        )

    def _fits(self, gpu: Gpu, function: PciFunction, outcome: "_Outcome", *, blocked: bool) -> Mapping[str, int] | None:
        mode = self.modes.of(function.address)
        if mode is not DesiredMode.ON_DEMAND or blocked:
            return _fits(gpu, mode, outcome, blocked=blocked)
        return None if outcome.vgpus is None else self._room(function, outcome)

    def _room(self, function: PciFunction, outcome: "_Outcome") -> Mapping[str, int] | None:
        """Return how many more vGPUs of each type a GPU in mode on-demand can carry; the types are alternatives.

        The driver's numbers are those of the vGPUs that exist now, so that those of the catalog count after a removal.
        """
        state = self.plans.on_demand.get(function.address)
        if state is None and not outcome.changes:
            return {} if outcome.reasons else None  # the reason is that its driver creates no vGPUs
        if state is not None and not outcome.changes:
            carried = carried_by(state)
            left = {} if isinstance(carried, Unread) else room(state, carried)
        elif (assumed := self._assumed_state(function)) is not None:
            types = Counter({VgpuType(name): count for name, count in (outcome.vgpus or {}).items()})
            left = room(assumed, Carried(types))
        else:
            return None
        listed = {profile_name(vgpu_type) for vgpu_type in state.known_types} if state is not None else None
        found = {profile_name(vgpu_type): count for vgpu_type, count in left.items() if count}
        return {name: count for name, count in found.items() if listed is None or name in listed}

    def _unknown(self, gpu: Gpu, function: PciFunction, outcome: "_Outcome", *, changes: bool) -> Iterator[str]:
        yield from outcome.unknown
        counts = {VgpuType(name): count for name, count in (outcome.vgpus or {}).items()}
        if outcome.changes and modes.may_lack_room(function, counts):
            yield MIXED_MODE
        if changes:
            yield HOST_ONLY
        if changes and gpu.mode in {Mode.CONTAINER, Mode.SHARED}:
            yield OTHER_PLUGINS
        if self.modes.of(gpu.address) is DesiredMode.SHARED and gpu.units is None:
            yield UNITS
        if gpu.mode == Mode.UNBOUND and self.modes.of(gpu.address) is not DesiredMode.PASSTHROUGH:
            yield NO_DRIVER

    def _outcome(self, gpu: Gpu, function: PciFunction, now: Counter[str]) -> "_Outcome":
        address = function.address
        desired = self.plans.desired.get(address)
        if desired is None or desired.vgpus is None:
            return _Outcome(now)
        if desired.vgpus.on_demand:
            return self._on_demand(gpu, function, now, desired.vgpus)
        _, question = self.plans.questions.get(address, (None, None))
        if question is not None and not question.of_room:
            then = Counter({name: count for name, count in desired.vgpus.types.items() if count})
            return _Outcome(then if then != now else now, changes=then != now, unknown=(NEEDS_SMI,))
        if question is not None and self.plans.planned_from is not None:
            state = self.plans.planned_from.states[address]  # `_unknown` says that nvidia-smi may report less room
            return _planned(gpu, plan_gpu(self.found.inventory.facts, address, state, desired.vgpus), now)
        plan = self.plans.plan_of(address)
        if plan.follows or any(isinstance(step, EnableVfs) for step in plan.steps):
            return self._assumed(function, desired.vgpus)
        return _planned(gpu, plan, now)

    def _on_demand(self, gpu: Gpu, function: PciFunction, now: Counter[str], desired: DesiredVgpus) -> "_Outcome":
        """Return the outcome in mode on-demand: vGPUs without a user are removed, and a pod gets a new one."""
        address = function.address
        if address in self.plans.questions:
            plan = plan_gpu(self.found.inventory.facts, address, self.plans.on_demand.get(address), desired)
            return replace(_planned(gpu, plan, now), unknown=(SMI_COUNTS,))
        plan = self.plans.plan_of(address)
        if plan.follows or any(isinstance(step, EnableVfs) for step in plan.steps):
            if self._assumed_state(function) is None:
                return _Outcome(Counter(), unknown=(NO_CARD,))
            return _Outcome(Counter(), changes=True, unknown=(BY_CATALOG,))
        return _planned(gpu, plan, now)

    def _assumed_state(self, function: PciFunction) -> GpuState | None:
        """Return a GPU without vGPUs as the catalog says, None for an unknown card."""
        host = assumed_host(function)
        if host is None:
            return None
        native = _on_native(function)
        facts = replace(
            self.found.inventory.facts, functions={native.address: native}, vgpu_hosts={native.address: host}
        )
        return gpu_state_of(build_inventory(facts), native.address, (), NAMESPACE)

    def _assumed(self, function: PciFunction, desired: DesiredVgpus) -> "_Outcome":
        """Return the outcome for a GPU whose driver lists no types yet: the planner's, on a GPU as the catalog says."""
        state = self._assumed_state(function)
        if state is None:
            return _Outcome(None, changes=True, unknown=(NO_CARD,))
        plan = plan_gpu(self.found.inventory.facts, function.address, state, desired)
        created = Counter(profile_name(step.type) for step in plan.steps if isinstance(step, CreateVgpu))
        reasons = tuple(_text(reason) for reason in plan.refusals)
        return _Outcome(created, changes=not plan.refusals, reasons=reasons, unknown=(BY_CATALOG,))


def _on_native(function: PciFunction) -> PciFunction:
    """Return a GPU as it is on the driver of NVIDIA's vGPU manager."""
    return replace(function, driver="nvidia", cdevs=())


class _Outcome(msgspec.Struct, frozen=True):
    """The vGPUs of a GPU after a plan, and what prevents it."""

    vgpus: Mapping[str, int] | None
    changes: bool = False
    in_the_way: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def _planned(gpu: Gpu, plan: VgpuPlan, now: Counter[str]) -> _Outcome:
    removed = {str(step.vgpu) for step in plan.steps if isinstance(step, RemoveVgpu)}
    then = now - Counter(profile_name(vgpu.type) for vgpu in gpu.vgpus if vgpu.id in removed)
    then += Counter(profile_name(step.type) for step in plan.steps if isinstance(step, CreateVgpu))
    kept = (vgpu for vgpu in gpu.vgpus if vgpu.id in plan.undesired and vgpu.id not in removed)
    users = user_texts(user for vgpu in kept for user in vgpu.users)
    reasons = tuple(_text(reason) for reason in (*plan.refusals, *plan.pending))
    return _Outcome(then, changes=bool(plan.steps), in_the_way=users, reasons=reasons)


def _moves(gpu: Gpu, mode: DesiredMode) -> bool:
    """Return whether the GPU would change its driver."""
    on_vfio = gpu.mode == Mode.PASSTHROUGH
    if mode is DesiredMode.UNMANAGED:
        return False
    return not on_vfio if mode is DesiredMode.PASSTHROUGH else on_vfio


def _fits(gpu: Gpu, mode: DesiredMode, outcome: _Outcome, *, blocked: bool) -> Mapping[str, int] | None:
    """Return how many VMs could start after the plan; a device that has a user is taken."""
    whole = mode is DesiredMode.PASSTHROUGH or (mode is DesiredMode.UNMANAGED and gpu.mode == Mode.PASSTHROUGH)
    if mode in FOR_CONTAINERS or blocked:
        return {}
    if whole:
        return {} if outcome.in_the_way or outcome.reasons or gpu.users else {WHOLE: 1}
    if outcome.vgpus is None:
        return None
    taken = Counter(profile_name(vgpu.type) for vgpu in gpu.vgpus if vgpu.users)
    return {name: count - taken[name] for name, count in outcome.vgpus.items() if count > taken[name]}


def _text(reason: Reason) -> str:
    """Return a reason without the places where it was seen: nothing was read on the node."""
    return f"{reason.code}: {reason.subject} {reason.message}" + (f"; fix: {reason.fix}" if reason.fix else "")
