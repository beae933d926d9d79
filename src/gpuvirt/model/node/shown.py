"""The inputs of a node's view, and the problems that it shows, by the node's decisions."""

from msgspec.structs import replace

from gpuvirt.model.change.desired import DesiredDrivers
from gpuvirt.model.change.invalidstates import InvalidStates
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.node.nodedecisions import NodeDecisions
from gpuvirt.model.node.picture import NodePicture, NodeTerms
from gpuvirt.model.offers.deviceusers import DeviceUsers
from gpuvirt.model.offers.givenshares import with_given
from gpuvirt.model.offers.namereview import NameReview
from gpuvirt.model.offers.validation import conditions, workload_of
from gpuvirt.model.offers.viewinputs import ViewInputs
from gpuvirt.model.offers.withholding import withholdings
from gpuvirt.model.reasons import Reason


def view_inputs(
    picture: NodePicture,
    decided: NodeDecisions,
    inventory: Inventory,
    drivers: DesiredDrivers,
    users: DeviceUsers,
    terms: NodeTerms,
) -> ViewInputs:
    """Return what the view follows from; `drivers` are the desired ones, `users` those of all devices."""
    memory, modes, given = decided.memory, decided.memory.desired.modes, picture.shares
    workload = workload_of(modes.default, inventory)
    naming = picture.naming(terms)
    return ViewInputs(
        inventory,
        memory.offers,
        users,
        naming if decided.names is None else replace(naming, first_names=decided.names.first_names),
        picture.registrations,
        problems_of(picture, decided.invalid, memory.review),
        terms.agent,
        invalid=decided.invalid.all,
        desired_by_gpu={gpu: str(modes.of(gpu)) for gpu in drivers},
        vgpu_configs=decided.desired.vgpus.configs,
        schedulers={gpu: report.scheduler for gpu, report in memory.smi.schedulers.items()},
        workload=workload,
        conditions=conditions(inventory, workload, drivers),
        withholdings={**memory.review.waiting, **withholdings(memory.desired.spec)},
        sharing=with_given(memory.sharing, given),
        pods_with_shares=given.pods_by_gpu() if given is not None else {},
        on_demand=memory.on_demand,
        given=users.given,
    )


def problems_of(picture: NodePicture, invalid: InvalidStates, review: NameReview) -> tuple[Reason, ...]:
    """Return the problems of the node, the invalid desired state first."""
    found = (*invalid.reasons, picture.unrecorded_tenants, review.problem, *picture.problems.values())
    return tuple(dict.fromkeys(reason for reason in found if reason is not None))
