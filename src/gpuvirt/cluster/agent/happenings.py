"""What an admin should hear of when a GpuNode's status changes."""

from collections.abc import Iterator

from gpuvirt.cluster.events import Happening, Kind
from gpuvirt.cluster.kinds.conditions import Condition
from gpuvirt.cluster.kinds.gpunode import READY, Status
from gpuvirt.model.reasons import ReasonCode


def happenings(before: Status | None, after: Status) -> Iterator[Happening]:
    """Yield what has changed between two statuses; of a first one, only what of the desired state is invalid."""
    known = {one.message for one in before.invalid} if before is not None else set[str]()
    for one in after.invalid:
        if one.message not in known:
            yield Happening(Kind.WARNING, one.code, one.message)
    if before is None:
        return
    modes = {gpu.address: gpu.mode for gpu in before.gpus}
    for gpu in after.gpus:
        if (mode := modes.get(gpu.address, gpu.mode)) != gpu.mode:
            yield Happening(Kind.NORMAL, "ModeChanged", f"{gpu.address} is in mode {gpu.mode} now, and was in {mode}")
    for address in sorted(modes.keys() - {gpu.address for gpu in after.gpus}):
        yield Happening(Kind.WARNING, "GpuGone", f"{address} is no longer there")
    ready, was = _ready(after), _ready(before)
    if ready is None or ready.reason == ReasonCode.AWAITS_CONTROLLER:
        return  # every new resource does for a moment
    if after.invalid and ready.message.startswith(after.invalid[0].message):
        return  # what is invalid has its own events
    if was is None or (ready.status, ready.reason) != (was.status, was.reason):
        kind = Kind.NORMAL if ready.status == "True" else Kind.WARNING
        yield Happening(kind, ready.reason, ready.message or "all GPUs are as they are wanted")


def _ready(status: Status) -> Condition | None:
    return next((one for one in status.conditions if one.type == READY), None)
