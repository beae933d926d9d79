"""GPUs without gates, for tests in which nothing changes a GPU."""

from collections.abc import Callable, Collection

from gpuvirt.facts.ids import DeviceId
from gpuvirt.model.reasons import Reason
from gpuvirt.model.shares.placement import GpuId


class OpenGpus:
    """Claims any GPU."""

    def why_closed(self, gpu: GpuId) -> Reason | None:
        del gpu
        return None

    def claim(self, gpus: Collection[GpuId], unit: DeviceId, record: Callable[[], None]) -> None:
        del gpus, unit
        record()
