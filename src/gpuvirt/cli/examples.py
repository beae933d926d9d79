"""The examples in the help of each command, which is loaded when help is asked for."""

from collections.abc import Mapping

import typer

EXAMPLES: Mapping[str, str] = {
    "gpuvirt devices": "the GPUs of this host, and why one is not offered",
    "gpuvirt devices --all-nodes -o wide": "the GPUs of all nodes of the cluster, with all columns",
    "gpuvirt devices --all-nodes -l rack=b -w": "the GPUs of the nodes with a label, again after each change",
    "gpuvirt why 0000:65:00.0": "what keeps a GPU of this host from VMs",
    "gpuvirt why vm/vm-a -n team": "why a VM of the cluster lacks its GPUs",
    "gpuvirt why node/node01": "what a node offers, and the pods that wait for it",
    "gpuvirt doctor": "the problems of this host",
    "gpuvirt doctor --kubeconfig admin.conf": "the problems of this host and of the cluster's KubeVirt",
    "gpuvirt status": "the components of all nodes",
    "gpuvirt status --wait --timeout 600": "wait until all components are ready",
    "gpuvirt shares": "the shared GPUs and their free units",
    "gpuvirt shares -l rack=b": "those of the nodes with a label",
    "gpuvirt shares -w": "the same after each change",
    "gpuvirt claims -A": "the claims (DRA) of all namespaces, and what each waits for",
    "gpuvirt plan node/node01 --workload vm-passthrough": "what a label of the workload would change on a node",
    "gpuvirt plan node/node01 --vgpu-config A10-4Q": "what a label of the vGPU config would change",
    "gpuvirt slices --dry-run": "the shapes of each GPU of this host for claims (DRA)",
    "gpuvirt slices --dry-run -o yaml": "the ResourceSlices",
    "gpuvirt support": "write an archive to this folder",
    "gpuvirt support --hide-names -o node01.tar.gz": "the same without names of pods and VMs",
    "gpuvirt vfio status": "the driver of each GPU, and whether the GPU can be bound for VMs",
    "gpuvirt vfio bind --all --dry-run": "the steps by which all GPUs would be bound for VMs",
    "gpuvirt vfio bind 0000:65:00.0": "bind a GPU for VMs",
    "gpuvirt vfio unbind 0000:65:00.0": "bind a GPU to its original driver",
    "gpuvirt vgpu list": "the vGPUs of this host, and their users",
    "gpuvirt vgpu types 0000:65:00.0": "the vGPU types of a GPU, and how many more fit",
    "gpuvirt vgpu create 0000:65:00.0 A10-4Q --count 2": "create two vGPUs",
    "gpuvirt vgpu delete 4b20d080-1b54-4048-85b3-a6a62d165c01": "remove a vGPU that is not in use",
    "gpuvirt vgpu apply -c A10-4Q --dry-run": "the steps by which all GPUs would get this vGPU type",
    "gpuvirt vgpu assert -c A10-4Q": "whether all GPUs have this vGPU type",
    "gpuvirt vgpu default-config --name A10-4Q": "a vGPU config to start from",
    "gpuvirt vgpu scheduler get": "the vGPU scheduler of each GPU",
    "gpuvirt vgpu scheduler set 0000:65:00.0 equal-share": "set the vGPU scheduler of a GPU",
    "gpuvirt install check manifests.yaml": "the parts that each node would get from the output of helm template",
    "gpuvirt install images manifests.yaml --os ubuntu22.04": "the images of an installation",
    "gpuvirt install crds deploy/chart/crds": "create or update gpuvirt's kinds",
    "gpuvirt install policy policy.yaml": "create or update the ClusterPolicy",
    "gpuvirt install namespace gpuvirt": "permit privileged agents in a namespace",
    "gpuvirt install verify --timeout 600": "wait until an installation works",
    "gpuvirt uninstall": "remove gpuvirt, and keep its kinds",
    "gpuvirt uninstall --crds": "remove gpuvirt with its kinds and all their objects",
    "gpuvirt schedule list": "the schedules, the phase of each, and its next switch",
    "gpuvirt schedule show gpus": "the workers and nodes of a schedule, and what each waits for",
    "gpuvirt schedule history gpus": "its last switches",
    "gpuvirt schedule plan -f schedule.yaml": "the switches of a schedule that is not applied yet",
    "gpuvirt schedule check gpus": "whether its workers and nodes can switch",
    "gpuvirt schedule switch gpus night --until 07:00": "begin a phase now, until 7 o'clock",
    "gpuvirt demo": "whole GPUs, vGPUs and shares of GPUs",
    "gpuvirt demo -H 4xT4": "the same on another simulated host",
    "gpuvirt sim hosts": "the hosts that can be simulated",
    "gpuvirt sim run -H 4xT4 -- gpuvirt devices": "run a program on a simulated host",
    "gpuvirt sim mount -H 4xT4 host": "mount a simulated host at a folder",
    "gpuvirt sim import node01.tar.gz -o node01.yaml": "simulate the host of a support archive",
    "gpuvirt completion bash": "a script for /etc/bash_completion.d, or for source <(...)",
    "gpuvirt completion zsh": "a script for the file _gpuvirt in a folder of fpath",
    "gpuvirt version": "the version of this program",
    "gpuvirt version -o json": "also those of the API server and of the agents",
    "gpuvirt node --node-name node01": "the agent of a node, in a pod or by hand",
    "gpuvirt controller --no-kubevirt": "a controller that leaves KubeVirt's configuration to you",
    "gpuvirt extender --policy spread": "an extender that prefers the GPU with most free units",
    "gpuvirt webhook --config webhook.yaml": "a webhook with a file of its settings",
    "gpuvirt discover --once": "print the labels of this host, and set none",
    "gpuvirt mps run": "run the daemon until SIGTERM",
    "gpuvirt mps quit": "stop the daemon once its last client has ended",
    "gpuvirt validate driver --wait": "wait until the driver works",
    "gpuvirt validate toolkit": "check the container toolkit",
    "gpuvirt validate plugin": "check the device plugin",
    "gpuvirt validate unused --wait": "wait until no VM uses a GPU of this host",
    "gpuvirt validate await driver-ready": "wait for the file of another check",
    "gpuvirt validate rest": "hold the pod of the checks",
}
"""A command line, and what it shows or does. The help of a group of commands has the examples of all its commands."""


def add_examples(program: typer.Typer, name: str = "gpuvirt") -> None:
    """Put the examples at the end of the help of all commands of a program."""
    for command in program.registered_commands:
        own = command.name or getattr(command.callback, "__name__", "")
        command.epilog = _text(f"{name} {own}")
    for group in program.registered_groups:
        group.epilog = _text(f"{name} {group.name}")
        if group.typer_instance is not None:
            add_examples(group.typer_instance, f"{name} {group.name}")


def _text(name: str) -> str:
    """Return the examples of a command as a paragraph that click does not wrap, which begins with a backspace."""
    lines = [f"  # {text}\n  {line}" for line, text in EXAMPLES.items() if f"{line} ".startswith(f"{name} ")]
    return "\b\n" + "\n".join(("Examples:", *lines))
