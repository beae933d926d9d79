"""The vGPUs that can be created on a simulated GPU, in each of its modes: as many as it reports, none overlapping."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuvirt.facts.ids import PciAddress
from gpuvirt_sim.devices.vgpu import SimVgpuHost
from gpuvirt_sim.hostspec import CardSpec, host_names, load_host, shared_cards

GPU = PciAddress("0000:01:00.0")
BOARDS = {name: board for name, board in shared_cards().items() if board.vgpu_types}


def vgpu_host(board: CardSpec, *, mixed_sizes: bool = False, mig: bool = False) -> SimVgpuHost:
    slots = [PciAddress(f"0000:01:{number // 8:02x}.{number % 8}") for number in range(4, 4 + (board.total_vfs or 1))]
    made = SimVgpuHost(GPU, board.vgpu_types, slots, board.mig_profiles, mixed_sizes=mixed_sizes, mig=mig)
    for profile in board.mig_profiles if mig else ():
        made.add_instance(profile)
    return made


@settings(deadline=None)
@given(st.data(), st.sampled_from(sorted(BOARDS)), st.sampled_from(["equal", "mixed", "mig"]))
def test_no_place_is_used_twice(data: st.DataObject, name: str, mode: str) -> None:
    gpu = vgpu_host(BOARDS[name], mixed_sizes=mode == "mixed", mig=mode == "mig")
    for number in range(data.draw(st.integers(0, 20))):
        free = [(spec, slot) for spec in gpu.types for slot in gpu.slots if gpu.left(spec, slot)]
        desired = data.draw(st.sampled_from(["one more", "one less"]))
        if free and desired == "one more":
            spec, slot = data.draw(st.sampled_from(free))
            gpu.take(str(number), spec, slot)
        elif gpu.live:
            gpu.free(data.draw(st.sampled_from(sorted(gpu.live))))
    places = [(gpu.places[vgpu], gpu.live[vgpu][0].gigabytes) for vgpu in gpu.places]
    taken = [number for place, size in places for number in range(place, place + size)]
    assert len(taken) == len(set(taken))
    used = Counter((instance, gpu.live[vgpu][0]) for vgpu, instance in gpu.on_instance.items())
    assert all(number <= spec.per_instance for (_, spec), number in used.items())
    assert len({instance for instance, _ in used}) == len(used), "vGPUs of one type share an instance"
    assert len({slot for _, slot in gpu.live.values()}) == len(gpu.live)
    if mode == "mixed":
        assert set(gpu.places) == set(gpu.live), "each has a placement"
    if mode == "equal":
        assert len({spec.size for spec, _ in gpu.live.values()}) <= 1


@pytest.mark.parametrize("name", [name for name, board in BOARDS.items() if any(t.places for t in board.vgpu_types)])
def test_a_card_that_mixes_sizes_has_placements_within_its_framebuffer(name: str) -> None:
    specs = [spec for spec in BOARDS[name].vgpu_types if spec.places]
    whole = max(spec.gigabytes for spec in specs)
    for spec in specs:
        ends = [place + spec.gigabytes for place in spec.places]
        assert all(end <= after for end, after in zip(ends, [*spec.places[1:], whole], strict=True)), spec.name
        assert len(spec.places) <= spec.most, "never more than in equal-size mode"


@pytest.mark.parametrize("name", [name for name, board in BOARDS.items() if board.mig_profiles])
def test_mig_types_have_profiles_that_fit_as_often_as_they_say(name: str) -> None:
    board = BOARDS[name]
    profiles = {profile.name: profile for profile in board.mig_profiles}
    for spec in board.vgpu_types:
        if spec.profile is not None:
            gpu = vgpu_host(board)
            made = 0
            while gpu.add_instance(profiles[spec.profile]):
                made += 1
            assert made * spec.per_instance == spec.most, spec.name


def test_there_is_a_host_in_each_mode() -> None:
    slots = [slot for name in host_names() for slot in load_host(name).slots]
    assert any(slot.mig for slot in slots)
    assert any(slot.mixed_sizes for slot in slots)
