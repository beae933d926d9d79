"""The roles of examples/roles are what each command needs: no request is refused, and no rule is unused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
import yaml

from gpuvirt.loops.serialworker import ThreadWorker
from tests.cli import fleet, plannedcluster, servedday, sharescluster, statuscluster, whycluster
from tests.cli.commandline import ran
from tests.extender.podapi import serving
from tests.kube.scriptedapi import FORBIDDEN, Call, Reply
from tests.schedules.coverednode import covered
from tests.schedules.servedcommands import SELF_REVIEWS, answering

FILE = Path(__file__).parent.parent.parent / "examples/roles/commands.yaml"
NAMESPACES = {"gpuvirt": "gpu-operator"}
"""The namespace of the release on some served clusters, and in the file."""
VERBS = {"PATCH": "patch", "POST": "create"}
Answer = Callable[[Call], Reply]


class Rule(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A rule of a role."""

    api_groups: tuple[str, ...]
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    resource_names: tuple[str, ...] = ()


class Metadata(msgspec.Struct, frozen=True):
    """A role's name, and the namespace of a Role."""

    name: str
    namespace: str = ""


class Role(msgspec.Struct, frozen=True):
    """A ClusterRole or a Role."""

    metadata: Metadata
    rules: tuple[Rule, ...]


class Right(msgspec.Struct, frozen=True, order=True):
    """One right: what a rule grants, or what a request needs."""

    namespace: str
    group: str
    resource: str
    verb: str
    name: str = ""


def granted(role: str) -> frozenset[Right]:
    """Return the rights of a role, and of the Role of this name in a namespace."""
    roles = (msgspec.convert(document, Role) for document in yaml.safe_load_all(FILE.read_text()))
    return frozenset(
        Right(found.metadata.namespace, group, resource, verb, name)
        for found in roles
        if found.metadata.name == role
        for rule in found.rules
        for group in rule.api_groups
        for resource in rule.resources
        for verb in rule.verbs
        for name in rule.resource_names or ("",)
    )


def needed(call: Call) -> Iterator[Right]:
    """Yield the rights of which a request needs one, as RBAC sees it."""
    target = urlsplit(call.target)
    query = parse_qs(target.query)
    parts = target.path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
    namespace, rest = (rest[1], rest[2:]) if rest[0] == "namespaces" and len(rest) > 2 else ("", rest)
    resource, name = rest[0], rest[1] if len(rest) > 1 else ""
    verb = VERBS.get(call.method) or ("get" if name else "watch" if "watch" in query else "list")
    by_field = query.get("fieldSelector", [""])[0]
    name = name or by_field.removeprefix("metadata.name=") * by_field.startswith("metadata.name=")
    for place in {NAMESPACES.get(namespace, namespace), ""}:
        for named in {name, ""}:
            yield Right(place, group, resource, verb, named)


class Guarded:
    """A cluster that grants a role, and what each user may."""

    def __init__(self, role: str, answer: Answer) -> None:
        self._granted, self._answer = granted(role), answer
        self.used = set[Right]()
        self.refused = list[str]()

    def answer(self, call: Call) -> Reply:
        if call.path == SELF_REVIEWS:
            return self._answer(call)
        rights = self._granted.intersection(needed(call))
        if not rights:
            self.refused.append(f"{call.method} {call.target}")
            return FORBIDDEN
        self.used |= rights
        return self._answer(call)


def planned() -> Answer:
    found = plannedcluster.cluster(*plannedcluster.GPUS)
    assert callable(found)
    return found


def on_a_day() -> Answer:
    return answering(servedday.on_a_day())


def with_configs() -> Answer:
    return answering(covered("T4-4Q", config_map="default-vgpu-devices-config").served)


SCHEDULE = ("gpuvirt-schedule", on_a_day)
COMMANDS: tuple[tuple[str, Callable[[], Answer], str], ...] = (
    ("gpuvirt-status", lambda: statuscluster.Cluster(statuscluster.VGPU_MANAGER).answer, "status"),
    ("gpuvirt-plan", planned, "plan node/node01 --vgpu-config A10-4Q"),
    ("gpuvirt-plan", lambda: fleet.answer, "devices --all-nodes"),
    ("gpuvirt-plan", lambda: fleet.answer, "devices --node node01"),
    ("gpuvirt-plan", lambda: fleet.answer, "vgpu list --all-nodes"),
    ("gpuvirt-shares", lambda: sharescluster.cluster().answer, "shares"),
    *(
        ("gpuvirt-why", lambda: whycluster.answer, f"why {target}")
        for target in (
            "vm/vm-a -n team",
            "vm/vm-b -n team",
            "vm/none -n team",
            "vmi/none -n team",
            "pod/waits -n team",
            "pod/starts -n team",
            "node/node01",
            "claim/starting -n team",
            "pod/pod-starting -n team",
        )
    ),
    ("gpuvirt-claims", lambda: whycluster.answer, "claims -A"),
    (*SCHEDULE, "schedule list"),
    (*SCHEDULE, "schedule show gpus"),
    (*SCHEDULE, "schedule history gpus"),
    (*SCHEDULE, "schedule plan gpus"),
    (*SCHEDULE, "schedule check gpus"),
    (*SCHEDULE, "schedule switch gpus night --until 2090-01-01T00:00"),
    ("gpuvirt-schedule", with_configs, "schedule check gpus"),
)


async def guarded(role: str, answer: Answer, command: str, folder: Path) -> tuple[Guarded, str]:
    """Run a command with a role; return what the role granted, and the output."""
    cluster = Guarded(role, answer)
    async with serving(cluster.answer, folder) as api:
        words = (*command.split(), "--kubeconfig", str(api.kubeconfig))
        done = await ThreadWorker("command").run(lambda: ran(*words), name="command", timeout_s=60.0)
    return cluster, done.stdout + done.stderr


@pytest.mark.parametrize(("role", "cluster", "command"), COMMANDS)
async def test_a_role_permits_all_that_its_command_asks(
    role: str, cluster: Callable[[], Answer], command: str, tmp_path: Path
) -> None:
    found, output = await guarded(role, cluster(), command, tmp_path)
    assert found.refused == [], output
    assert found.used


async def watched(folder: Path) -> Guarded:
    """Follow the shares of a cluster until a pod has ended."""
    api = sharescluster.cluster()
    cluster = Guarded("gpuvirt-shares", api.answer)
    arguments = ("shares", "--watch", "--no-headers")
    async with sharescluster.called(folder, api, *arguments, answer=cluster.answer) as process:
        assert process.stdout is not None
        await process.stdout.readuntil(b"train")
        api.delete("pods", "default/train")
        while b"train" in await process.stdout.readuntil(b"worker01"):
            pass
    return cluster


async def test_no_rule_of_a_role_is_unused(tmp_path: Path) -> None:
    watching = await watched(tmp_path)
    assert watching.refused == []
    used = {"gpuvirt-shares": watching.used}
    for role, cluster, command in COMMANDS:
        found, _ = await guarded(role, cluster(), command, tmp_path)
        used.setdefault(role, set()).update(found.used)
    assert {role: granted(role) - rights for role, rights in used.items()} == dict.fromkeys(used, frozenset())
