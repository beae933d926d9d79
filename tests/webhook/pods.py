"""Pods of random shape, as programs and users send them: lists may be absent, null or empty, fields unknown."""

from typing import TypeVar

from hypothesis import strategies as st

from gpuvirt.plain import Plain

T = TypeVar("T")
MDEV, TYPE, WHOLE = "tencent.com/vgpu-492", "nvidia.com/NVIDIA_L40S-12Q", "nvidia.com/GA102GL_A10"
Pod = dict[str, Plain]

names = st.sampled_from(["a", "b", "main", "side"])
amounts: st.SearchStrategy[Plain] = st.sampled_from(["1", "2", 1, "0", "1e0"])
paths = st.sampled_from(["/data", "/dev", "/usr/share/nvidia", "/usr/share/nvidia/", "/etc"])
values = st.sampled_from(["", "/opt/lib", "/usr/share/nvidia/lib64", "/bin:/usr/share/nvidia/bin", "$(HOME)/x:/y"])
variables: st.SearchStrategy[Plain] = st.one_of(
    st.fixed_dictionaries({"name": st.sampled_from(["PATH", "LD_LIBRARY_PATH", "X"]), "value": values}),
    st.fixed_dictionaries({"name": st.sampled_from(["PATH", "LD_LIBRARY_PATH"]), "valueFrom": st.just({"f": 1})}),
    st.fixed_dictionaries({"name": st.sampled_from(["PATH", "Y"])}),
)
mounts: st.SearchStrategy[Plain] = st.fixed_dictionaries({"name": st.sampled_from(["data", "dev"]), "mountPath": paths})
volumes: st.SearchStrategy[Plain] = st.sampled_from(
    [{"name": "data", "emptyDir": {}}, {"name": "more", "hostPath": None}, {"name": "x", "secret": {"secretName": "s"}}]
)


def go_list(items: st.SearchStrategy[Plain]) -> st.SearchStrategy[Plain]:
    """Return a list as Go writes it: null where it is empty."""
    return st.one_of(st.none(), st.lists(items, max_size=3))


def sometimes(fields: dict[str, st.SearchStrategy[Plain]]) -> st.SearchStrategy[Pod]:
    """Return an object, each of whose fields may be absent."""
    return st.fixed_dictionaries({}, optional=fields)


def containers(resources: list[str]) -> st.SearchStrategy[Plain]:
    """Return containers that request some of these resources."""
    quantities = st.one_of(st.none(), st.dictionaries(st.sampled_from([*resources, "cpu"]), amounts, max_size=2))
    fields: dict[str, st.SearchStrategy[Plain]] = {
        "env": go_list(variables),
        "volumeMounts": go_list(mounts),
        "resources": st.one_of(st.none(), sometimes({"limits": quantities, "requests": quantities})),
        "restartPolicy": st.sampled_from(["Always"]),
        "future": st.just({"a": [None, 1]}),
    }
    return st.builds(lambda name, more: {"name": name, "image": "x", **more}, names, sometimes(fields))


def pods(classes: list[str | None], resources: list[str]) -> st.SearchStrategy[Pod]:
    """Return pods of some RuntimeClasses, whose containers request some of these resources."""
    spec = st.builds(
        lambda runtime_class, own, more: {"runtimeClassName": runtime_class, "containers": own, **more},
        st.sampled_from(classes),
        st.lists(containers(resources), min_size=1, max_size=3),
        sometimes(
            {
                "initContainers": go_list(containers(resources)),
                "volumes": go_list(volumes),
                "securityContext": st.just({"runAsNonRoot": True}),
                "future": st.just([1, {"x": None}]),
            }
        ),
    )
    metadata = sometimes({"name": st.just("p"), "annotations": st.sampled_from([None, {}, {"a/b": "c"}])})
    return st.builds(
        lambda found, of: {"apiVersion": "v1", "kind": "Pod", "metadata": of, "spec": found}, spec, metadata
    )


def vgpu_pods() -> st.SearchStrategy[Pod]:
    """Return pods of class kata that request a vGPU in one container at least."""

    def with_vgpu(pod: Pod, resource: str) -> Pod:
        spec = pod["spec"]
        assert isinstance(spec, dict)
        own = spec["containers"]
        assert isinstance(own, list)
        added: Plain = {"name": "gpu", "resources": {"limits": {resource: "1"}}}
        return {**pod, "spec": {**spec, "containers": [*own, added]}}

    return st.builds(with_vgpu, pods(["kata"], [MDEV, TYPE]), st.sampled_from([MDEV, TYPE]))
