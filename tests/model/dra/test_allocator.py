"""Kubernetes' own allocator gives no GPU in two shapes, and refuses no claim that fits.

What fits is told by the kernel's isolation units and by what a GPU can be, without counters.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import pytest
from lab.dra.allocator import Given, allocator

from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.scan import scan
from gpuvirt.model.inventory.inventory import build_inventory
from tests.model.dra.shapedhosts import HOSTS, SIMULATED, Device, devices, kernel_of, printed, slices
from tests.thoroughness import examples

pytestmark = pytest.mark.ring("dra")

Object = dict[str, object]
WHOLE = 1000
STEPS = 400
SHAPES = ("container", "passthrough", "vgpu", "shared")
CLASSES: list[Object] = [
    {
        "metadata": {"name": f"{shape}.gpuvirt.io"},
        "spec": {
            "selectors": [
                {
                    "cel": {
                        "expression": 'device.driver == "gpuvirt.io" &&'
                        f' device.attributes["gpuvirt.io"].type == "{shape}"'
                    }
                }
            ]
        },
    }
    for shape in SHAPES
]


class Share(NamedTuple):
    """A device that a claim may get, with the units of it."""

    device: Device
    units: int


class Desired(NamedTuple):
    """One alternative of a request."""

    shape: str
    profile: str | None
    units: int | None

    @property
    def spec(self) -> Object:
        """Its text in a claim."""
        found: Object = {"deviceClassName": f"{self.shape}.gpuvirt.io", "allocationMode": "ExactCount", "count": 1}
        if self.profile is not None:
            expression = f'device.attributes["gpuvirt.io"].profile == "{self.profile}"'
            found["selectors"] = [{"cel": {"expression": expression}}]
        if self.units is not None:
            found["capacity"] = {"requests": {"units": str(self.units)}}
        return found

    def of(self, offered: Iterable[Device]) -> Iterator[Share]:
        """Yield the devices that it may get."""
        for device in offered:
            if device.text("type") == self.shape and self.profile in {None, _profile(device)}:
                units = (self.units or device.most("units")) if self.shape == "shared" else WHOLE
                yield Share(device, units)


def _profile(device: Device) -> str | None:
    return device.text("profile") if device.text("type") == "vgpu" else None


def desired(random: Random, offered: Sequence[Device]) -> Desired:
    device = random.choice(offered)
    shape = device.text("type")
    profile = _profile(device) if random.random() < 0.9 else None
    units = random.choice((1, 100, 300, 500)) if shape == "shared" and random.random() < 0.9 else None
    return Desired(shape, profile, units)


def claim(number: int, requests: Sequence[Sequence[Desired]]) -> Object:
    written: list[Object] = []
    for index, alternatives in enumerate(requests):
        if len(alternatives) == 1:
            written.append({"name": f"r{index}", "exactly": alternatives[0].spec})
        else:
            several = [{"name": f"a{at}", **each.spec} for at, each in enumerate(alternatives)]
            written.append({"name": f"r{index}", "firstAvailable": several})
    about = {"name": f"c{number}", "namespace": "default", "uid": f"uid-{number}"}
    return {"metadata": about, "spec": {"devices": {"requests": written}}}


def is_possible(shares: Iterable[Share], units_of: Mapping[str, str]) -> bool:
    """Return whether a host can give all of these at a time."""
    by_gpu: defaultdict[str, list[Share]] = defaultdict(list)
    for share in shares:
        by_gpu[share.device.gpu].append(share)
    by_unit = Counter(units_of[gpu] for gpu in by_gpu)
    for gpu, given in by_gpu.items():
        device = given[0].device
        shape = device.text("type")
        if any(share.device.name != device.name for share in given):
            return False
        if shape in {"container", "passthrough"} and len(given) > 1:
            return False
        if shape == "passthrough" and by_unit[units_of[gpu]] > 1:
            return False
        if shape == "vgpu" and len(given) > device.most("instances"):
            return False
        if shape == "shared" and sum(share.units for share in given) > device.most("units"):
            return False
    return True


def shares_of(given: Iterable[Given], by_name: Mapping[str, Device]) -> list[Share]:
    return [
        Share(by_name[each.device], int(each.consumed_capacity.get("units", "0").replace("k", "000"))) for each in given
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [*HOSTS, *SIMULATED])
def test_no_gpu_is_given_in_two_shapes_and_nothing_that_fits_is_refused(name: str, tmp_path: Path) -> None:
    text = printed(name, tmp_path)
    offered, random = devices(slices(text)), Random(name)  # noqa: S311  a claim is no secret
    inventory, by_name = build_inventory(scan(kernel_of(name))), {device.name: device for device in offered}
    units_of = {str(gpu): str(found.unit) for gpu, found in inventory.gpus.items()}
    held: dict[int, tuple[Given, ...]] = {}
    outcomes = Counter[bool]()
    with allocator("node01", msgspec.json.decode(text)["items"], CLASSES) as kubernetes:
        for number in range(examples(STEPS)):
            if held and random.random() < 0.4:
                del held[random.choice(sorted(held))]
                continue
            asked = [
                [desired(random, offered) for _ in range(random.choice((1, 1, 2)))]
                for _ in range(random.choice((1, 1, 1, 2)))
            ]
            before = [each for given in held.values() for each in given]
            found = kubernetes.allocate(claim(number, asked), before)
            outcomes[found is not None] += 1
            if found is not None:
                held[number] = found
                assert is_possible(shares_of((*before, *found), by_name), units_of), (before, found)
            else:
                choices = [[share for each in request for share in each.of(offered)] for request in asked]
                fitting = [
                    chosen
                    for chosen in product(*choices)
                    if is_possible((*shares_of(before, by_name), *chosen), units_of)
                ]
                assert not fitting, (before, asked, fitting[:1])
    assert min(outcomes[True], outcomes[False]) > outcomes.total() // 20, outcomes
    assert {PciAddress(device.gpu) for device in offered} <= inventory.gpus.keys()
