"""Decoding of stored ClusterPolicies."""

import msgspec
import pytest

from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, SpecFault, StoredPolicy, UpdateStrategy, read_policy
from gpuvirt.kube.kinds.clusterpolicy import plain_spec as plain
from gpuvirt.kube.kinds.vmoperands import SandboxMode
from gpuvirt.model.desired.workload import Workload


def stored(spec: object) -> StoredPolicy:
    written = {"metadata": {"name": "cluster-policy", "generation": 3}, "spec": spec}
    return msgspec.json.decode(msgspec.json.encode(written), type=StoredPolicy)


def read(spec: object) -> ClusterPolicy:
    found = read_policy(stored(spec))
    assert isinstance(found, ClusterPolicy), found
    return found


def test_a_spec_is_decoded_by_the_field_names_of_nvidias_operator() -> None:
    spec = read(
        {
            "sandboxWorkloads": {"enabled": True, "defaultWorkload": "vm-vgpu", "mode": "kubevirt"},
            "hostPaths": {"rootFS": "/host", "driverInstallDir": "/opt/driver", "kubeletRootDir": "/data/kubelet"},
            "operator": {"use_ocp_driver_toolkit": True, "runtimeClass": "gpus"},
            "daemonsets": {"updateStrategy": "OnDelete", "rollingUpdate": {"maxUnavailable": "10%"}},
            "driver": {"useNvidiaDriverCRD": True, "rdma": {"useHostMofed": True}},
            "validator": {"vfioPCI": {"env": [{"name": "A", "value": "b"}]}},
            "vgpuDeviceManager": {"config": {"name": "mine", "default": "A10-4Q"}},
            "dcgmExporter": {"hostPID": True},
        }
    ).spec
    assert spec.sandbox_workloads.enabled is True
    assert spec.sandbox_workloads.default_workload is Workload.VGPU
    assert spec.sandbox_workloads.mode is SandboxMode.KUBEVIRT
    assert (spec.host_paths.root_fs, spec.host_paths.driver_install_dir) == ("/host", "/opt/driver")
    assert spec.host_paths.kubelet_root_dir == "/data/kubelet"
    assert (spec.operator.use_ocp_driver_toolkit, spec.operator.runtime_class) == (True, "gpus")
    assert spec.daemonsets.update_strategy is UpdateStrategy.ON_DELETE
    assert spec.daemonsets.rolling_update is not None
    assert spec.daemonsets.rolling_update.max_unavailable == "10%"
    assert spec.driver.use_nvidia_driver_crd is True
    assert spec.driver.rdma is not None
    assert spec.driver.rdma.use_host_mofed is True
    assert [(variable.name, variable.value) for variable in spec.validator.vfio_pci.env] == [("A", "b")]
    assert spec.vgpu_device_manager.config is not None
    assert spec.vgpu_device_manager.config.default == "A10-4Q"
    assert spec.dcgm_exporter.host_pid is True


def test_an_absent_field_differs_from_a_field_set_to_its_default() -> None:
    assert read({}).spec.driver.enabled is None
    assert read({"driver": {"enabled": True}}).spec.driver.enabled is True
    assert read({}).spec.gds is None
    assert read({"gds": {}}).spec.gds is not None


@pytest.mark.parametrize(
    "spec",
    [
        None,
        {},
        {"fabricManager": {"mode": [1, None]}, "driver": {"upgradePolicy": {"drain": 3}, "newer": {}}},
        {"kataManager": {"config": {"runtimeClasses": "odd"}}, "daemonsets": {"podSecurityContext": 3}},
        {"operator": {"metrics": []}, "dcgmExporter": {"serviceMonitor": {"relabelings": [{"x": 1}]}}},
        {"vfioManager": {"resources": {"limits": {"cpu": 1, "memory": "200Mi"}}}},
    ],
)
def test_unknown_fields_are_kept_and_ignored(spec: object) -> None:
    assert read(spec).metadata.generation == 3
    assert plain(stored(spec)) == (spec or {})


@pytest.mark.parametrize(
    ("spec", "path", "reported"),
    [
        ({"driver": {"enabled": "yes"}}, "$.spec.driver.enabled", 'expected true or false, found text "yes"'),
        (
            {"sandboxWorkloads": {"defaultWorkload": "kata"}},
            "$.spec.sandboxWorkloads.defaultWorkload",
            'expected one of: container, shared, vm-passthrough, vm-vgpu, on-demand, claims; found text "kata"',
        ),
        ({"daemonsets": {"labels": {"a": 1}}}, "$.spec.daemonsets.labels[...]", "expected text, found a whole number"),
        ([], "$.spec", "expected a mapping, found an empty list"),
    ],
)
def test_an_invalid_field_is_reported_with_its_path(spec: object, path: str, reported: str) -> None:
    assert read_policy(stored(spec)) == SpecFault(path, reported)
