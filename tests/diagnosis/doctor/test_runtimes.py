"""CDI in the merged files of a container runtime: containerd's with imports, CRI-O's one by one."""

import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuvirt.diagnosis.findings import Finding
from gpuvirt.facts.runtimes import Runtime, parse_toml
from gpuvirt.hardware.host.runtimes import MOST_FILES, read_runtimes, without_secrets
from gpuvirt.model.desired.settings import CdiUse, Settings
from gpuvirt.model.reasons import FindingCode
from gpuvirt.model.reasons.codes import Level
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.platform import PlatformSpec
from gpuvirt_sim.kernel import SimKernel
from tests.diagnosis.doctor.sickhost import examine, findings, host
from tests.thoroughness import examples

OWN = "/etc/containerd/config.toml"
FOLDER = "/etc/containerd/conf.d"
V1, V2 = '[plugins."io.containerd.grpc.v1.cri"]\n', '[plugins."io.containerd.cri.v1.runtime"]\n'
ON, OFF = "enable_cdi = true\n", "enable_cdi = false\n"
IMPORTS = f'version = 2\nimports = ["{FOLDER}/*.toml"]\n'


def with_files(files: dict[str, str]) -> SimKernel:
    return host(PlatformSpec(files=files))


def runtimes(files: dict[str, str]) -> list[Runtime]:
    return list(read_runtimes(with_files(files)))


def cdi_findings(kernel: SimKernel) -> list[Finding]:
    report = examine(kernel, settings=Settings(cdi=CdiUse.ANSWERS))
    return [finding for result in report.results if result.check == "container_cdi" for finding in result.findings]


@pytest.mark.parametrize(
    ("imports", "loaded"),
    [
        (f'["{FOLDER}/*.toml"]', ["10-a.toml", "20-b.toml"]),
        ('["conf.d/*.toml"]', ["10-a.toml", "20-b.toml"]),
        ('["./conf.d/20-b.toml", "conf.d/10-a.toml"]', ["20-b.toml", "10-a.toml"]),
        ('["conf.d/[1]*.toml"]', ["10-a.toml"]),
        ('["conf.d/[^1]*-?.toml"]', ["20-b.toml"]),
        ('["*/20*"]', ["20-b.toml"]),
        ('["../containerd/conf.d/10-a.toml"]', ["10-a.toml"]),
        ('["/../../../../etc/containerd/conf.d/10-a.toml"]', ["10-a.toml"]),
        ('["conf.d/20-b.toml", "conf.d/*"]', ["20-b.toml", "10-a.toml", "notes"]),
        ('["conf.d/none.toml", "config.toml", "gone/*"]', []),
        ('["/proc/self/environ", "/dev/*", "/sys/x", "/*/kvm"]', []),
        ('["\\u0000", 3, ["x"]]', []),
        ("3", []),
    ],
)
def test_import_patterns_match_as_in_containerd(imports: str, loaded: list[str]) -> None:
    files = {OWN: f"version = 2\nimports = {imports}\n"}
    files |= {f"{FOLDER}/{name}": "version = 2\n" for name in ("20-b.toml", "10-a.toml", "notes")}
    kernel = with_files(files)
    (found,) = read_runtimes(kernel)
    assert [file.path for file in found.files] == [OWN, *(f"{FOLDER}/{name}" for name in loaded)]
    assert not [path for path in kernel.reads if path.startswith(("/dev/", "/proc/self", "/sys/x"))]


def test_nested_imports_come_last_and_import_cycles_end() -> None:
    files = {
        OWN: 'imports = ["a.toml", "b.toml"]',
        "/etc/containerd/a.toml": 'imports = ["more/c.toml", "config.toml"]',
        "/etc/containerd/b.toml": 'imports = ["a.toml"]',
        "/etc/containerd/more/c.toml": 'imports = ["../b.toml"]',
    }
    (found,) = runtimes(files)
    assert [file.path.rpartition("/")[2] for file in found.files] == ["config.toml", "a.toml", "b.toml", "c.toml"]


def test_too_many_imports_are_reported() -> None:
    files = {OWN: 'version = 3\nimports = ["n/*.toml"]'}
    files |= {f"/etc/containerd/n/{number}.toml": "" for number in range(MOST_FILES + 10)}
    (found,) = runtimes(files)
    assert len(found.files) == MOST_FILES + 1
    assert {finding.code for finding in cdi_findings(with_files(files))} == {FindingCode.NOT_READ}


@pytest.mark.parametrize("path", [f"{FOLDER}/x.toml", FOLDER])
def test_an_unreadable_import_is_reported(path: str) -> None:
    kernel = with_files({OWN: IMPORTS + V1 + ON, f"{FOLDER}/x.toml": ""})
    kernel.faults.fail(HostPath(path), errno.EACCES)
    (reported,) = cdi_findings(kernel)
    assert (reported.code, reported.seen[0].path, reported.seen[0].value) == (FindingCode.NOT_READ, path, "EACCES")


@pytest.mark.parametrize(
    ("own", "imported", "level", "seen"),
    [
        (V1, V1 + ON, Level.OK, f"{FOLDER}/x.toml: enable_cdi: True"),
        (V1 + ON, "", Level.OK, f"{OWN}: enable_cdi: True"),
        (V1 + ON, V1 + OFF, Level.ERROR, f"{FOLDER}/x.toml: enable_cdi = false"),
        (V1 + OFF, V1 + ON, Level.OK, f"{FOLDER}/x.toml: enable_cdi: True"),
        (V1, V1 + 'cdi_spec_dirs = ["/run/cdi"]\n', Level.WARNING, f"{OWN}: version = 2, no enable_cdi"),
        (V1 + ON, V1 + 'cdi_spec_dirs = ["/etc/cdi"]\n' + ON, Level.ERROR, f"{FOLDER}/x.toml: cdi_spec_dirs"),
        (V1 + ON, V1 + "sandbox = 1\n", Level.WARNING, f"{FOLDER}/x.toml: [plugins.io.containerd.grpc.v1.cri]"),
    ],
)
def test_imported_values_override_the_importing_file(own: str, imported: str, level: Level, seen: str) -> None:
    """If containerd's versions read the same files differently, doctor reports that."""
    kernel = with_files({OWN: IMPORTS + own, f"{FOLDER}/x.toml": "version = 2\n" + imported})
    (reported,) = cdi_findings(kernel)
    assert reported.level is level
    assert seen in "\n".join(f"{place.path}: {place.value}" for place in reported.seen)


@pytest.mark.parametrize("version", [3, 4])
def test_cdi_is_enabled_by_default_since_config_version_3(version: int) -> None:
    assert [finding.level for finding in cdi_findings(with_files({OWN: f"version = {version}\n{V2}"}))] == [Level.OK]


def test_each_cri_o_file_is_reported() -> None:
    files = {"/etc/crio/crio.conf": "", "/etc/crio/crio.conf.d/10.conf": "[crio.runtime]\ncdi_spec_dirs = []\n"}
    assert [finding.code for finding in cdi_findings(with_files(files))] == [None, FindingCode.CDI_FOLDER_NOT_READ]


TOML = st.sampled_from(
    [
        "version = 2\n", "version = 3\n", "version = 'x'\n", "imports = ['conf.d/*.toml', 'a b', 3]\n", V1, V2,
        "[crio.runtime]\n", "[crio]\nruntime = 3\n", ON, OFF, "enable_cdi = 'secret'\n", "x = 'secret'\n",
        "cdi_spec_dirs = ['/run/cdi', '/etc/secret x']\n", "plugins = 3\n", "= secret\n",
        '[plugins."io.containerd.grpc.v1.cri".registry.configs."r".auth]\npassword = "secret"\n',
    ]
)  # fmt: skip


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(TOML, max_size=8).map("".join))
def test_a_redacted_configuration_yields_the_same_findings(text: str) -> None:
    reported = without_secrets(text)
    assert "secret" not in reported
    assert without_secrets(reported) == reported
    assert (parse_toml(reported) is None) == (parse_toml(text) is None)
    plain = "'secret'" not in text and "/etc/secret" not in text and "'x'" not in text
    kernels = [with_files({OWN: content}) for content in (text, reported)]
    one, other = ([(found.level, found.code) for found in findings(examine(kernel))] for kernel in kernels)
    assert one == other
    assert not plain or cdi_findings(kernels[0]) == cdi_findings(kernels[1])
