"""Several kubeconfigs, merged as kubectl merges them."""

from pathlib import Path

import pytest

from gpuvirt.errors import ConfigError
from gpuvirt.kube.access.kubecontext import from_kubeconfig

FIRST = """
clusters:
- {name: shared, cluster: {server: "https://first.example", certificate-authority: ca.pem}}
users: null
contexts:
- {name: one, context: {cluster: shared, user: lent, namespace: mine}}
"""
SECOND = """
current-context: two
clusters:
- {name: shared, cluster: {server: "https://second.example"}}
- {name: own, cluster: {server: "https://own.example"}}
users:
- {name: lent, user: {tokenFile: token, client-certificate: crt, client-key: /etc/key}}
contexts:
- {name: two, context: {cluster: own, user: lent}}
"""
THIRD = "current-context: one\n"


@pytest.fixture(name="paths")
def make_paths(tmp_path: Path) -> Path:
    files = []
    for name, text in (("first", FIRST), ("second", SECOND), ("third", THIRD)):
        (tmp_path / name).mkdir()
        files.append(tmp_path / name / "config")
        files[-1].write_text(text)
    return Path(f"{files[0]}:{tmp_path}/missing::{files[1]}:{files[2]}")


def test_the_first_file_that_defines_an_entry_wins(paths: Path, tmp_path: Path) -> None:
    found = from_kubeconfig(paths, "one")
    assert (found.host, found.namespace, found.ca) == ("first.example", "mine", tmp_path / "first/ca.pem")
    assert found.token == tmp_path / "second/token", "a path is relative to its own file"
    assert (found.certificate, found.key) == (tmp_path / "second/crt", Path("/etc/key"))


def test_the_first_current_context_wins(paths: Path) -> None:
    found = from_kubeconfig(paths)
    assert (found.host, found.namespace) == ("own.example", "default")


def test_an_unknown_context_is_reported_with_the_existing_contexts(paths: Path) -> None:
    with pytest.raises(ConfigError, match=r"--context: there is no context 'three' in .*; expected one of: one, two"):
        from_kubeconfig(paths, "three")


def test_a_missing_current_context_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(FIRST)
    with pytest.raises(ConfigError, match="there is no current context; expected --context with one of: one"):
        from_kubeconfig(tmp_path / "config")


def test_a_fault_is_reported_with_the_file_that_has_the_fault(paths: Path, tmp_path: Path) -> None:
    (tmp_path / "second/config").write_text(SECOND.replace("https://own", "http://own"))
    with pytest.raises(ConfigError) as refused:
        from_kubeconfig(paths)
    assert (refused.value.where, refused.value.path) == (f"{tmp_path}/second/config", "$.clusters[1].cluster.server")


@pytest.mark.parametrize(("names", "reported"), [("a", "can't be read: No such file"), ("a:b", "these files exists")])
def test_files_that_are_all_missing_are_reported(tmp_path: Path, names: str, reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        from_kubeconfig(Path(":".join(f"{tmp_path}/{name}" for name in names.split(":"))))


def test_duplicate_names_in_a_kubeconfig_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(f"{FIRST}- {{name: one}}\n")
    with pytest.raises(ConfigError, match=r"\$.contexts\[1\].name: two entries have the name 'one'"):
        from_kubeconfig(tmp_path / "config")
