"""Operands as Kubernetes objects, rendered from a policy and facts of the cluster. Pure: no request is made.

Each operand is a manifest that `kubectl apply` takes (`manifests`), and Python changes what a policy decides. So it can
be compared with NVIDIA's, and its comments stand beside the fields. Refused: a template language, whose output only the
API server checks; strategic merge patches, which need each list's key.

A rendered byte that changes gives a template another digest, which replaces running pods at an upgrade: manifests keep
fields with default values, and tests compare the digests of many policies. An applied object is checked by a digest and
by its fields: a digest alone misses manual edits, a comparison alone writes again what the server normalizes.

NVIDIA's driver container unbinds all GPUs of a node when it starts, and its vGPU manager ends the programs behind
running vGPUs when it stops. So operands that take GPUs wait until the agent has reported that no VM can have one. What
an older agent does not report is unknown, and waits. A node without an agent may have VMs, too: there, an init
container of the driver waits. A VM that starts between that check and the driver is not detected.

A missing operand is found by its pod: a DaemonSet does not count a node whose taint excludes its pods.
"""
