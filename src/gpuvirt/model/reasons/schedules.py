"""Why nothing is done for a VgpuSchedule, or what a worker of it waits for."""

from collections.abc import Sequence

from gpuvirt.model.reasons.nodeproblems import config_invalid
from gpuvirt.model.reasons.reason import Reason, Seen, without_code
from gpuvirt.model.reasons.reasoncodes import ReasonCode

SHOWN = 5
"""How many names a message lists."""
SCHEDULE = "the VgpuSchedule"


def spec_invalid(field: str, problem: str) -> Reason:
    """A field of the spec can't be used."""
    return Reason(ReasonCode.SCHEDULE_INVALID, field, problem, fix="correct the field; nothing is done until then")


def cron_line_invalid(field: str, line: str, problem: str) -> Reason:
    """A start of a phase is no cron line."""
    fix = "write minute, hour, day of the month, month and day of the week: 0 7 * * 1-5"
    return Reason(ReasonCode.CRON_LINE_INVALID, field, f"is not a cron line: {problem}", (Seen(field, line),), fix)


def time_zone_unknown(field: str, zone: str) -> Reason:
    """The zone is not in the database."""
    fix = "write a name of the IANA database: Europe/Berlin, UTC"
    return Reason(ReasonCode.TIME_ZONE_UNKNOWN, field, "is not a known time zone", (Seen(field, zone),), fix)


def phase_unreachable(phase: str, line: str) -> Reason:
    """A phase never begins."""
    fix = "correct the day and the month of the line"
    message = "never begins: no day fits its cron line"
    return Reason(ReasonCode.PHASE_UNREACHABLE, f"phase {phase}", message, (Seen("start", line),), fix)


def phases_overlap(phases: Sequence[str], at: str) -> Reason:
    """It is not decided which of two phases holds. Changed clocks are no reason: of a missing hour the last counts."""
    names = " and ".join(phases)
    fix = "have the phases begin at different times"
    return Reason(ReasonCode.PHASES_OVERLAP, f"phases {names}", "begin at the same time", (Seen("", at),), fix)


def worker_in_two_schedules(node: str, schedules: Sequence[str]) -> Reason:
    """Two schedules would switch one VM."""
    message = f"is a worker of several schedules: {', '.join(schedules)}"
    fix = "change the labels of the node, or the workers of a phase"
    return Reason(ReasonCode.WORKER_IN_TWO_SCHEDULES, f"node {node}", message, fix=fix)


def node_in_two_schedules(node: str, schedules: Sequence[str]) -> Reason:
    """Two schedules would change the vGPU config of one node."""
    message = f"gets vGPU configs from several schedules: {', '.join(schedules)}"
    fix = "change the labels of the node, or the nodes of a phase"
    return Reason(ReasonCode.NODE_IN_TWO_SCHEDULES, f"node {node}", message, fix=fix)


def vgpu_config_pending(node: str, config: str, problem: str, code: str = "") -> Reason:
    """The agent applies it once no VM uses a vGPU that has to go. `code` is the agent's, if the catalogue has it."""
    known = ReasonCode.named(code) or ReasonCode.VGPU_CONFIG_PENDING
    message = f"does not have the vGPU config {config} yet: {problem}"
    fix = "stop or migrate the VMs that use its vGPUs, or wait until they end; then the node gets the vGPU config"
    return Reason(known, f"node {node}", message, fix=fix)


def no_gpu_node(node: str, config: str) -> Reason:
    """A node's agent makes its GpuNode."""
    message = (
        f"does not have the vGPU config {config} yet: it has no GpuNode, so it has no GPUs that gpuvirt manages, or no"
        " agent has started there"
    )
    fix = "check with gpuvirt status whether an agent runs on the node; such nodes have the label gpuvirt.io/node=true"
    return Reason(ReasonCode.VGPU_CONFIG_PENDING, f"node {node}", message, fix=fix)


def vgpu_config_overridden(node: str, config: str, origin: str) -> Reason:
    """The vGPU config that an admin has set in a GpuNode takes precedence."""
    message = f"does not get the vGPU config {config}: vgpuConfig is {origin}"
    fix = f"remove spec.vgpuConfig from GpuNode {node}, or the node from the schedule"
    return Reason(ReasonCode.VGPU_CONFIG_OVERRIDDEN, f"node {node}", message, fix=fix)


def vgpu_config_unknown(phase: str, config: str, where: str, near: str | None) -> Reason:
    """Agents would keep the vGPUs that they have. `near` is the most similar name of a config."""
    message = f"names the vGPU config {config}, which does not exist"
    hint = f"; did you mean {near}?" if near is not None else ""
    seen = Seen("vGPU configs", f"those of {where}, and the built-in ones (gpuvirt vgpu default-config)")
    fix = f"correct vgpuConfig of the phase, or add the vGPU config to {where}{hint}"
    return config_invalid(f"phase {phase}", message, fix, seen)


def vgpu_config_unusable(node: str, config: str, problem: str) -> Reason:
    """The config has no entry for the node's cards."""
    message = f"would not get the vGPU config {config}: {without_code(str(ReasonCode.CONFIG_INVALID), problem)}"
    return config_invalid(f"node {node}", message, None)


def vgpu_configs_unread(phase: str, config: str, problem: str) -> Reason:
    """A name that is no built-in one may be right."""
    message = f"names the vGPU config {config}, and gpuvirt does not know whether it exists: {problem}"
    return Reason(ReasonCode.VGPU_CONFIGS_UNKNOWN, f"phase {phase}", message, fix="see the ClusterPolicy's ConfigMap")


def mode_without_vgpus(node: str, config: str, mode: str) -> Reason:
    """A vGPU config holds for GPUs in mode vgpu alone."""
    message = f"gets no vGPUs from the vGPU config {config}: the mode of the node is {mode}"
    fix = f"kubectl label node {node} nvidia.com/gpu.workload.config=vm-vgpu"
    return Reason(ReasonCode.MODE_WITHOUT_VGPUS, f"node {node}", message, fix=fix)


def profile_label_selects(field: str, key: str, phases: Sequence[str]) -> Reason:
    """A switch would change which workers it has."""
    message = f"has the label {key}, by which these phases select workers: {', '.join(phases)}"
    fix = "select workers by a label that the schedule does not set"
    return Reason(ReasonCode.PROFILE_LABEL_SELECTS, field, message, fix=fix)


def profile_missing(node: str, given: Sequence[str], lacking: Sequence[str]) -> Reason:
    """The VM would keep the type of another phase."""
    message = f"has a vGPU type in phase {', '.join(given)}, but none in phase {', '.join(lacking)}"
    fix = "add a profile that selects the node to each of its phases"
    return Reason(ReasonCode.PROFILE_MISSING, f"node {node}", message, fix=fix)


def not_one_vgpu(node: str, vm: str, types: Sequence[str], desired: str) -> Reason:
    """It is not known which vGPU would be changed."""
    message = f"is on VM {vm} with {len(types)} vGPUs; its type can't be changed to {desired}"
    fix = "give the VM exactly one vGPU, or remove the profile"
    return Reason(ReasonCode.NOT_ONE_VGPU, f"node {node}", message, (Seen("vGPUs", ", ".join(types)),), fix)


def suspended_with_type(node: str, vm: str, vgpu_type: str, desired: str) -> Reason:
    """A hypervisor changes no device of a suspended VM."""
    message = f"is on VM {vm}, which is suspended with the vGPU type {vgpu_type}, so it can't get {desired}"
    fix = "resume the VM, and the schedule shuts it down; or power it off (its suspended memory is lost)"
    return Reason(ReasonCode.SUSPENDED_WITH_TYPE, f"node {node}", message, fix=fix)


def not_allowed(namespace: str, allowed: str) -> Reason:
    """A schedule reads Secrets, and drains nodes."""
    fix = f"create it in namespace {allowed}"
    message = "is not in the controller's namespace, so nothing is done for it"
    return Reason(ReasonCode.SCHEDULE_NOT_ALLOWED, SCHEDULE, message, (Seen("namespace", namespace),), fix)


def hypervisor_unknown(code: str, text: str) -> Reason:
    """Nothing is known about any VM. `code` is the connection's, if the catalogue has it; its text has a fix then."""
    known = ReasonCode.named(code) or ReasonCode.HYPERVISOR_UNKNOWN
    message = f"gave no complete answer, so no VM counts as off: {without_code(code, text)}"
    fix = "see server, CA and user in the schedule's Secret" if known is ReasonCode.HYPERVISOR_UNKNOWN else None
    return Reason(known, "the hypervisor", message, fix=fix)


def vm_not_matched(node: str, similar: Sequence[str]) -> Reason:
    """A call would reach a VM that is not the worker. `similar` has the VMs that share its UUID or its name."""
    message = "is the node of no VM that the hypervisor shows"
    if similar:
        message = (
            f"is not proven to be the node of VM {', '.join(similar)}: exactly one VM must have the node's system UUID,"
            " and if it is KubeVirt's, an IP address of the node, too"
        )
    fix = (
        "compare the node's systemUUID and providerID with the VMs; of KubeVirt's VMs, name the one that it is:"
        f" kubectl annotate node {node} gpuvirt.io/vm=NAMESPACE/NAME"
    )
    return Reason(ReasonCode.VM_NOT_MATCHED, f"node {node}", message, fix=fix)


def vm_of_two_schedules(node: str, vm: str, other: str) -> Reason:
    """A schedule would suspend the VM that serves another one."""
    message = f"is not proven to be the node of VM {vm}: {other}, has that VM, too"
    fix = "delete the Node that is stale: the other one renews its Lease (kubectl get leases -n kube-node-lease)"
    return Reason(ReasonCode.VM_NOT_MATCHED, f"node {node}", message, fix=fix)


def vm_not_visible(node: str, vm: str) -> Reason:
    """A VM that is not shown may run."""
    message = f"is on VM {vm}, which the hypervisor no longer shows"
    fix = "check that the user of the Secret may see the VM; if the VM was deleted, delete the Node, too"
    return Reason(ReasonCode.VM_NOT_VISIBLE, f"node {node}", message, fix=fix)


def node_not_registered(node: str) -> Reason:
    """Pods of the worker can't be seen."""
    fix = "restart its kubelet, which registers it; give it the labels of its phase"
    return Reason(ReasonCode.NODE_NOT_REGISTERED, f"node {node}", "has no Node object", fix=fix)


def worker_labels_lost(node: str, phases: Sequence[str]) -> Reason:
    """A controller of the cloud deletes the Node of a VM that is off."""
    message = f"was deleted and registered again, and is no longer selected by its phases: {', '.join(phases)}"
    return Reason(ReasonCode.WORKER_LABELS_LOST, f"node {node}", message, fix="label it: kubectl label node")


def pods_block_drain(node: str, pods: Sequence[str]) -> Reason:
    """`kubectl drain` refuses these pods without --force or --delete-emptydir-data."""
    message = f"is not drained, because some pods have no controller, or have an emptyDir volume: {_named(pods)}"
    fix = "delete the pods, or set deleteBarePods or deleteEmptyDirData in the schedule's drain"
    return Reason(ReasonCode.POD_BLOCKS_DRAIN, f"node {node}", message, fix=fix)


def pods_left(node: str, pods: Sequence[str]) -> Reason:
    """Pods end by themselves, or a budget is in the way."""
    fix = "see the pods and their PodDisruptionBudgets: kubectl get pdb -A"
    return Reason(ReasonCode.PODS_LEFT, f"node {node}", f"still has pods: {_named(pods)}", fix=fix)


def volumes_attached(node: str, attachments: Sequence[str]) -> Reason:
    """A suspended VM would keep its volumes from other nodes."""
    message = f"still has volumes: {_named(attachments)}"
    return Reason(ReasonCode.VOLUMES_ATTACHED, f"node {node}", message, fix="see kubectl get volumeattachments")


def gpu_still_used(node: str, workers: Sequence[str]) -> Reason:
    """Two phases would have one GPU."""
    message = f"waits for the GPU, which workers of another phase may still use: {_named(workers)}"
    return Reason(ReasonCode.GPU_STILL_USED, f"node {node}", message, fix="see what those workers wait for")


def step_pending(node: str, step: str) -> Reason:
    """A step takes some time."""
    fix = "see the events of the schedule, and the tasks of the hypervisor"
    return Reason(ReasonCode.STEP_PENDING, f"node {node}", f"waits for the step {step} to take effect", fix=fix)


def call_refused(node: str, code: str, text: str) -> Reason:
    """The hypervisor's own words. `code` is the connection's, if the catalogue has it."""
    known = ReasonCode.named(code) or ReasonCode.CALL_REFUSED
    return Reason(known, f"node {node}", f"stays as it is, since the hypervisor refuses: {without_code(code, text)}")


def no_heartbeat(node: str) -> Reason:
    """The condition Ready is that of before the suspension for up to 50 s."""
    message = "does not count as ready: its VM runs, but its kubelet has not renewed its Lease, or is not Ready"
    return Reason(ReasonCode.NO_HEARTBEAT, f"node {node}", message, fix="see the kubelet's log in the VM")


def clock_skewed(node: str, seconds: int) -> Reason:
    """A resumed guest's clock may stand at the time of its suspension."""
    message = f"has a clock that differs from the controller's by {seconds} s"
    fix = "set the guest's clock at resume: VMware Tools or chrony with makestep"
    return Reason(ReasonCode.CLOCK_SKEWED, f"node {node}", message, fix=fix)


def right_missing(subject: str, problem: str) -> Reason:
    """A rule of a role is missing. `problem` has the API server's words, and the rule."""
    message = f"waits for a right of the controller: {problem}"
    fix = "add the rule to the controller's role; the chart's value schedule.enabled=true has all rules"
    return Reason(ReasonCode.RIGHT_MISSING, subject, message, fix=fix)


def stored_right(text: str) -> Reason:
    """Return the missing right that a condition names by its whole text."""
    words = without_code(ReasonCode.RIGHT_MISSING, text).removeprefix(f"{SCHEDULE} ")
    return Reason(ReasonCode.RIGHT_MISSING, SCHEDULE, words)


def phase_given_up(phase: str) -> Reason:
    """A phase that is held until shortly before its end would be reached for minutes, or not at all."""
    message = "was given up, because its switch was held until shortly before its end; the phase before it is back"
    fix = "see the events of the schedule for what held the switch; gpuvirt schedule switch tries the phase again"
    return Reason(ReasonCode.PHASE_GIVEN_UP, f"phase {phase}", message, fix=fix)


def others_stay(node: str, workers: Sequence[str]) -> Reason:
    """A switch of some workers would take their pods, and free the GPU for nobody."""
    message = f"is not drained, because not all VMs that leave are known to be able to: {_named(workers)}"
    fix = "see what those workers wait for, or set begin: Anyway in the schedule"
    return Reason(ReasonCode.OTHERS_STAY, f"node {node}", message, fix=fix)


def stored(code: str, subject: str, message: str, fix: str) -> Reason | None:
    """Return the reason that a status has in parts; None if it has none, or one of another version."""
    known = ReasonCode.named(code)
    return Reason(known, subject, message, fix=fix or None) if known is not None else None


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
