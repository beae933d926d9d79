"""A night with another vGPU type for the same workers, over HTTPS: what is written, planned and checked."""

from gpuvirt.model.workers.hypervisor import Action, Call, Power, VmKey, VmProof
from gpuvirt_schedules.decide.forecast import PlannedAction
from tests.schedules.scheduleday import SCHEDULE, SPEC, Day, playing
from tests.schedules.schedulequestions import asking, put_secret
from tests.schedules.servedschedule import NODES, Object
from tests.web.certificates import Authority, Pair

WORKERS: Object = {"matchLabels": {"pool": "gpu"}}


def spec(**labels: str) -> Object:
    """Return a spec with which worker-1 has 4 GiB by day and 16 GiB by night, and worker-2 works by day alone."""
    night: Object = {"vgpuType": "grid-16q", "labels": {"vgpu.type": "v100-16q", **labels}}
    day: Object = {"workers": WORKERS, "vgpuType": "grid-4q", "labels": {"vgpu.type": "v100-4q"}}
    phases: list[Object] = [
        {"name": "day", "start": "0 7 * * 1-5", "workers": WORKERS, "profiles": [day]},
        {
            "name": "night",
            "start": "0 20 * * 1-5",
            "workers": {"matchLabels": {"size": "large"}},
            "profiles": [{"workers": {"matchLabels": {"absent": "x"}}, "vgpuType": "grid-8q"}, night],
        },
    ]
    return {**SPEC, "phases": phases}


def day_with_profiles(**labels: str) -> Day:
    day = Day((1, 2))
    del day.hypervisor.vms[VmKey("key-5")]
    day.served.delete(f"{NODES}/worker-5")
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": spec(**labels)})
    for name, size in (("worker-1", "large"), ("worker-2", "small")):
        node = day.served.objects[f"{NODES}/{name}"]
        own = {"pool": "gpu", "size": size, "vgpu.type": "v100-4q"}
        day.served.put(f"{NODES}/{name}", {**node, "metadata": {"labels": own}})
    for vm in day.hypervisor.vms.values():
        vm.set_type("grid-4q")
    return day


def labels_of(day: Day, name: str) -> object:
    metadata = day.served.objects[f"{NODES}/{name}"]["metadata"]
    assert isinstance(metadata, dict)
    return metadata["labels"]


async def test_a_worker_changes_its_type_and_its_labels(authority: Authority, server: Pair) -> None:
    day = day_with_profiles()
    put_secret(day)
    async with asking(day, server, authority.certificate) as questions:
        plan = await questions.plan("gpus")
        check = await questions.check("gpus")
    assert plan.forecast is not None
    assert plan.forecast.waiting == ()
    own = [(step.action, step.target) for step in plan.forecast.steps if step.node == "worker-1"]
    assert own == [
        (PlannedAction.CORDON, "worker-1"),
        (PlannedAction.EVICT, "default/train-0"),
        (PlannedAction.SHUT_DOWN, "worker-1"),
        (PlannedAction.SET_VGPU_TYPE, "worker-1 grid-16q"),
        (PlannedAction.START, "worker-1"),
        (PlannedAction.LABEL, "vgpu.type=v100-16q"),
        (PlannedAction.UNCORDON, "worker-1"),
    ]
    assert [(worker.node, worker.phase_types, worker.set_vgpu_type is not None) for worker in check.workers] == [
        ("worker-1", ("grid-4q", "grid-16q"), True),
        ("worker-2", (), True),
    ]
    assert check.holds

    day.now_s += 7200.0
    made: list[Call] = []
    day.hypervisor.on_call = lambda call, sender: made.append(call)
    async with playing(day, server, authority.certificate) as (rounds, _):
        await rounds.run()
    first = VmKey("key-1")
    assert [call for call in made if call.vm == first] == [
        Call(VmProof(first), Action.SHUT_DOWN),
        Call(VmProof(first), Action.SET_VGPU_TYPE, "grid-16q"),
        Call(VmProof(first), Action.START),
    ]
    assert [call.action for call in made if call.vm != first] == [Action.SUSPEND]
    assert labels_of(day, "worker-1") == {"pool": "gpu", "size": "large", "vgpu.type": "v100-16q"}
    assert labels_of(day, "worker-2") == {
        "pool": "gpu",
        "size": "small",
        "vgpu.type": "v100-4q",
        "gpuvirt.io/cordoned-by": "gpus",
    }
    workers = day.status()["workers"]
    assert isinstance(workers, list)
    assert workers[0]["types"] == {"day": "grid-4q", "night": "grid-16q"}
    assert day.conditions()["Ready"] == ("True", "PhaseReached")


async def test_a_profile_whose_label_selects_workers_is_refused(authority: Authority, server: Pair) -> None:
    day = day_with_profiles(size="medium")
    async with playing(day, server, authority.certificate) as (rounds, _):
        assert await rounds.round() is None
    assert day.conditions()["Valid"] == ("False", "ProfileLabelSelects")
    assert all(vm.power is Power.ON for vm in day.hypervisor.vms.values())
    assert [write for write in day.served.writes if "/nodes/" in write] == []


async def test_a_worker_without_a_profile_in_one_of_its_phases_is_refused(authority: Authority, server: Pair) -> None:
    day = day_with_profiles()
    content = spec()
    phases = content["phases"]
    assert isinstance(phases, list)
    phases[0] = {**phases[0], "profiles": []}
    day.served.put(SCHEDULE, {"metadata": {"generation": 2}, "spec": content})
    async with playing(day, server, authority.certificate) as (rounds, _):
        assert await rounds.round() == 60.0
    assert day.conditions()["Valid"] == ("False", "ProfileMissing")
    assert [write for write in day.served.writes if "/nodes/" in write] == []
