"""`gpuvirt vgpu types` says how many vGPUs of a type fit on a GPU, and not how many VFs could carry one."""

import json

import pytest

from tests.cli.commandline import gpuvirt


@pytest.mark.parametrize(
    ("host", "gpu", "left"),
    [
        ("2xA10-sriov", "0000:65:00.0", {"A10-24Q": 1, "A10-12Q": 2, "A10-4Q": 6, "A10-1Q": 24}),
        ("4xT4", "0000:af:00.0", {"T4-16Q": 0, "T4-8Q": 1}),
    ],
)
def test_a_type_fits_as_often_as_the_card_holds_it(host: str, gpu: str, left: dict[str, int]) -> None:
    done = gpuvirt("sim", "run", "-H", host, "--snapshot", "--", "gpuvirt", "vgpu", "types", gpu, "-o", "json")
    rows = json.loads(done.stdout)
    assert {row["name"]: row["left"] for row in rows if row["name"] in left} == left


def test_vgpus_of_other_sizes_take_their_part_of_the_card() -> None:
    done = gpuvirt("sim", "run", "-H", "2xA10-vgpu", "--snapshot", "--", "gpuvirt", "vgpu", "types", "-o", "json")
    rows = json.loads(done.stdout)
    gpu = next(row["gpu"] for row in rows if row["there"])
    parts = {"A10-12Q": 12, "A10-4Q": 4, "A10-8Q": 8, "A10-1Q": 1, "A10-2Q": 2, "A10-6Q": 6, "A10-3Q": 3}
    taken = sum(parts[row["name"]] * row["there"] for row in rows if row["gpu"] == gpu and row["there"])
    assert taken > 0
    (small,) = (row["left"] for row in rows if row["gpu"] == gpu and row["name"] == "A10-1Q")
    assert small == 24 - taken
