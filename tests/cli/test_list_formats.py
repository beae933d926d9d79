"""The formats of commands that list things: documents, names that other commands take, wide tables, rows alone."""

import json
from collections.abc import Mapping

import pytest

from gpuvirt import plain
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from tests.cli.commandline import ran

LISTS = (("devices",), ("vgpu", "list"), ("vgpu", "types"), ("vfio", "status"), ("vgpu", "scheduler", "get"))
DOCUMENTS = (*LISTS, ("doctor",), ("why", "0000:4b:00.0"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    root = tmp_path_factory.mktemp("host") / "host"
    export(build_host(load_host("2xA10-vgpu")), root)
    return {"GPUVIRT_HOST_ROOT": str(root)}


def printed(environment: Mapping[str, str], *arguments: str) -> list[str]:
    done = ran(*arguments, environment=environment)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("command", DOCUMENTS, ids=" ".join)
def test_yaml_is_the_document_that_json_is(environment: Mapping[str, str], command: tuple[str, ...]) -> None:
    of_json = json.loads("\n".join(printed(environment, *command, "-o", "json")))
    of_yaml = plain.read("\n".join(printed(environment, *command, "-o", "yaml")), where="yaml").content
    for document in (of_json, of_yaml):
        if isinstance(document, dict):
            document.pop("at", None)  # the time
    assert of_yaml == of_json


@pytest.mark.parametrize("command", LISTS, ids=" ".join)
def test_without_headers_each_line_is_a_row(environment: Mapping[str, str], command: tuple[str, ...]) -> None:
    rows = printed(environment, *command, "--no-headers")
    whole = printed(environment, *command)
    assert rows
    assert [row.split() for row in rows] == [line.split() for line in whole[1 : len(rows) + 1]]


@pytest.mark.parametrize("command", LISTS, ids=" ".join)
def test_a_wide_table_has_all_columns_on_one_line(environment: Mapping[str, str], command: tuple[str, ...]) -> None:
    narrow = {**environment, "COLUMNS": "40"}
    head, *_ = printed(narrow, *command, "-o", "wide")
    assert set(printed(environment, *command)[0].split()) <= set(head.split())
    rows = printed(narrow, *command, "-o", "wide", "--no-headers")
    assert len(rows) == len(printed(environment, *command, "--no-headers"))


def test_wide_devices_have_columns_that_the_table_lacks(environment: Mapping[str, str]) -> None:
    wide = printed(environment, "devices", "-o", "wide")
    assert {"VFS", "CONFIG", "VMS"} <= set(wide[0].split()) - set(printed(environment, "devices")[0].split())


def test_names_are_what_other_commands_take(environment: Mapping[str, str]) -> None:
    gpus, vgpus, types, *others = (printed(environment, *command, "-o", "name") for command in LISTS)
    assert others == [gpus, gpus[:1]]
    assert gpus == ["0000:4b:00.0", "0000:b1:00.0"]
    assert len(types) == len(set(types)) > 1
    for device in (*gpus, *vgpus):
        assert json.loads(ran("why", device, "-o", "json", environment=environment).stdout)["device"]
    assert ran("vgpu", "delete", *vgpus, "--dry-run", environment=environment).returncode == 0
    for name in types:
        assert ran("vgpu", "default-config", "--name", name, environment=environment).returncode == 0


def test_a_name_is_no_format_of_a_report(environment: Mapping[str, str]) -> None:
    assert ran("doctor", "-o", "name", environment=environment).returncode == 2


def test_the_names_of_simulated_hosts_are_what_their_commands_take() -> None:
    names = ran("sim", "hosts", "-o", "name").stdout.splitlines()
    assert "2xA10-vgpu" in names
    assert all(load_host(name) for name in names)
