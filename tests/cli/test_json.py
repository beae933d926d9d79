"""The JSON that commands print matches docs/reference/json.md."""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

from gpuvirt.cli.main import COMMANDS, program_for
from gpuvirt.plain import Plain
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from tests.cli.commandline import GPUVIRT, PATH, ran
from tests.cli.documentedjson import OBJECTS, PRINTS, fits
from tests.kube.scriptedapi import NOT_FOUND, Call, Reply, scripted
from tests.schedules.scheduleday import Day
from tests.schedules.servedcommands import answering
from tests.web.certificates import Authority

KINDS_OF_KUBERNETES = {"slices"}
"""The commands whose JSON is not gpuvirt's to describe."""
WITHOUT_TABLES = {
    "node",
    "controller",
    "extender",
    "webhook",
    "uninstall",
    "discover",
    "demo",
    "support",
    "install crds",
    "install namespace",
    "install policy",
    "install images",
    "install verify",
    "sim run",
    "sim mount",
    "sim import",
    "mps run",
    "mps quit",
    "validate driver",
    "validate toolkit",
    "validate plugin",
    "validate unused",
    "validate await",
    "validate rest",
    "vgpu default-config",
    "completion",
}
"""Programs that stay, that tell what they do line by line, or that print a file."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("x", "number"),
        (True, "number"),
        (1, "boolean"),
        (None, "text"),
        ("x", "time"),
        ("x", "one of `a`, `b`"),
        ("x", "(one of `a`, `b`)?"),
        (["x", 1], "text[]"),
        ([None], "text[]"),
        ([], "text"),
        ({"a": None}, "text{}"),
        ({"name": "x"}, "SimulatedHostRow"),
        ({"name": "x", "about": "y", "more": 1}, "SimulatedHostRow"),
    ],
)
def test_a_value_that_differs_from_its_documented_shape_is_detected(value: Plain, words: str) -> None:
    assert not fits(value, words)


def leaves(group: TyperGroup, *names: str) -> Iterator[tuple[str, bool]]:
    """Yield each command below a group, and whether it has `-o json`."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from leaves(command, *names, name)
        else:
            choices = {choice for option in command.params for choice in getattr(option.type, "choices", ())}
            yield " ".join((*names, name)), {"table", "json"} <= {str(choice) for choice in choices}


def test_every_command_with_a_table_has_documented_json() -> None:
    programs = (typer.main.get_group(program_for([name])).commands[name] for name in COMMANDS)
    groups = dict(zip(COMMANDS, programs, strict=True))
    found = dict(leaves(TyperGroup(name="gpuvirt", commands=groups)))
    assert {name for name, has_json in found.items() if not has_json} == WITHOUT_TABLES
    documented = {re.sub(r" [A-Z].*| vm/.*| node/.*| --.*", "", name) for name in PRINTS}
    assert {name for name, has_json in found.items() if has_json} == {*documented, *KINDS_OF_KUBERNETES}


def test_every_documented_object_is_explained_and_used() -> None:
    used = {
        word
        for text in (*PRINTS.values(), *(text for fields in OBJECTS.values() for text in fields.values()))
        for word in re.findall(r"\b[A-Z]\w+", re.sub(r"`[^`]*`", "", text))  # without members of enums
    }
    assert used == OBJECTS.keys()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) / "host" for name in ("8xH100", "2xA10-vgpu", "2xA10-no-iommu")}
    for name, folder in found.items():
        export(build_host(load_host(name)), folder)
    return found


ON_HOSTS = {
    "devices": ("devices",),
    "doctor": ("doctor",),
    "why ADDRESS|RESOURCE": ("why", "0000:65:00.0"),
    "vfio status": ("vfio", "status"),
    "vfio bind": ("vfio", "bind", "--all", "--dry-run"),
    "vfio unbind": ("vfio", "unbind", "--all", "--dry-run"),
    "vgpu apply": ("vgpu", "apply", "-c", "default", "--dry-run"),
    "vgpu assert": ("vgpu", "assert", "-c", "default"),
    "vgpu list": ("vgpu", "list"),
    "vgpu types": ("vgpu", "types"),
    "vgpu create": ("vgpu", "create", "{gpu}", "A10-4Q", "--dry-run"),
    "vgpu delete": ("vgpu", "delete", "{vgpu}", "--dry-run"),
    "vgpu scheduler get": ("vgpu", "scheduler", "get"),
    "vgpu scheduler set": ("vgpu", "scheduler", "set", "{gpu}", "equal-share", "--dry-run"),
    "sim hosts": ("sim", "hosts"),
}
POLICY = Path(__file__).parent.parent / "kube/guidepolicy.yaml"
IN_GPUVIRT = ("-n", "gpuvirt")
OF_CLUSTERS = {
    "devices --node NAME|--all-nodes": ("devices", "--all-nodes"),
    "vgpu list --node NAME|--all-nodes": ("vgpu", "list", "--all-nodes"),
    "shares": ("shares",),
    "claims": ("claims", "-A"),
    "version": ("version",),
    "status": ("status",),
    "install check": ("install", "check", str(POLICY)),
    "why vm/NAME|vmi/NAME|pod/NAME|claim/NAME": ("why", "vm/vm"),
    "why node/NAME": ("why", "node/a1"),
    "plan node/NAME": ("plan", "node/a1", "--vgpu-config", "A10-4Q"),
    "schedule list": ("schedule", "list", *IN_GPUVIRT),
    "schedule show NAME": ("schedule", "show", "gpus", *IN_GPUVIRT),
    "schedule history NAME": ("schedule", "history", "gpus", *IN_GPUVIRT),
    "schedule plan NAME": ("schedule", "plan", "gpus", *IN_GPUVIRT),
    "schedule check NAME": ("schedule", "check", "gpus", *IN_GPUVIRT),
    "schedule switch NAME PHASE": (
        *("schedule", "switch", "gpus", "night", "--until", "2100-01-01T00:00", "--dry-run"),
        *IN_GPUVIRT,
    ),
}


def test_every_documented_shape_is_tested() -> None:
    assert {*ON_HOSTS, *OF_CLUSTERS} == PRINTS.keys()


@pytest.mark.parametrize("command", ON_HOSTS)
def test_host_commands_print_the_documented_json(hosts: Mapping[str, Path], command: str) -> None:
    printed: list[Plain] = []
    for name, folder in hosts.items():
        environment = {"GPUVIRT_HOST_ROOT": str(folder)}
        vgpus = json.loads(ran("vgpu", "list", "-o", "json", environment=environment).stdout)
        if "{vgpu}" in ON_HOSTS[command] and not vgpus:
            continue
        places = {"gpu": vgpus[0]["gpu"] if vgpus else "0000:65:00.0", "vgpu": vgpus[0]["id"] if vgpus else ""}
        arguments = [argument.format(**places) for argument in ON_HOSTS[command]]
        done = ran(*arguments, "-o", "json", environment=environment)
        if done.returncode == 2:
            assert "no GPU of this host" in done.stderr or "no such" in done.stderr, (name, done.stderr)
            continue
        printed.append(json.loads(done.stdout))
        assert fits(printed[-1], PRINTS[command]), (name, done.stdout)
    assert any(printed), "the command printed output on at least one host"


KUBECONFIG = """
current-context: x
contexts: [{{name: x, context: {{cluster: c, user: u, namespace: default}}}}]
clusters: [{{name: c, cluster: {{server: "https://127.0.0.1:{port}", certificate-authority: {authority}}}}}]
users: [{{name: u, user: {{token: x}}}}]
"""


@pytest.mark.parametrize("command", sorted(OF_CLUSTERS))
async def test_cluster_commands_print_the_documented_json(tmp_path: Path, command: str) -> None:
    authority = Authority(tmp_path)
    schedules = answering(Day().served)

    def answer(call: Call) -> Reply:
        if command.startswith("schedule"):
            return schedules(call)
        is_list = call.path.rpartition("/")[2].isalpha() and not call.path.endswith("/vm")
        if call.path == "/api/v1/nodes/a1":
            return 200, {"metadata": {"name": "a1"}}
        items = [{"metadata": {"name": "a1"}}] if call.path.endswith("/gpunodes") else []
        return (200, {"metadata": {"resourceVersion": "1"}, "items": items}) if is_list else NOT_FOUND

    async with scripted(answer, authority.server("api", alternatives="IP:127.0.0.1"), authority.certificate) as api:
        config = tmp_path / "config"
        config.write_text(KUBECONFIG.format(port=api.port, authority=authority.certificate))
        process = await asyncio.create_subprocess_exec(
            *GPUVIRT,
            *OF_CLUSTERS[command],
            "-o",
            "json",
            "--kubeconfig",
            str(config),
            env={"PATH": PATH},
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await process.communicate()
    assert fits(json.loads(printed), PRINTS[command]), printed
