"""The catalogue of reasons: the codes of problems of devices, changes, the agent, the controller and KubeVirt."""

from functools import partial

from gpuvirt.model.reasons.codes import Code, Level, Topic, entry

_not_offered = partial(entry, Topic.NOT_OFFERED)
_unhealthy = partial(entry, Topic.UNHEALTHY)
_allocate = partial(entry, Topic.ALLOCATE)
_change = partial(entry, Topic.CHANGE)
_vgpu = partial(entry, Topic.VGPU)
_scheduler = partial(entry, Topic.SCHEDULER)
_agent = partial(entry, Topic.AGENT)
_controller = partial(entry, Topic.CONTROLLER)
_kubevirt = partial(entry, Topic.KUBEVIRT)
_hypervisor = partial(entry, Topic.HYPERVISOR)
_admission = partial(entry, Topic.ADMISSION)
_schedule = partial(entry, Topic.SCHEDULE)


class ReasonCode(Code):
    """Why something is not offered, unhealthy, refused, pending or failed."""

    NATIVE_DRIVER = _not_offered("NativeDriver", "the function is bound to a driver of the host", Level.OK)
    NO_DRIVER = _not_offered(
        "NoDriver",
        "the function has no driver. On a host with NVSwitches an admin must probe the native driver, which may hang",
    )
    NO_IOMMU_GROUP = _not_offered(
        "NoIommuGroup",
        "the device is in no IOMMU group: VT-d or AMD-Vi is off, or the kernel has no `VFIO_GROUP` (for an mdev)",
        Level.ERROR,
    )
    ADDRESS_NOT_ACCEPTED = _not_offered(
        "AddressNotAccepted", "the PCI domain has over four digits (Intel VMD), which KubeVirt refuses"
    )
    KIND_NOT_OFFERED = _not_offered("KindNotOffered", "the setting `offer` lacks this kind of function", Level.OK)
    VIRTUAL_FUNCTION = _not_offered(
        "VirtualFunction", "an NVIDIA VF, which works only as a vGPU, is bound to a VFIO driver"
    )
    VFS_ENABLED = _not_offered(
        "VfsEnabled",
        "the GPU has VFs: a VM can open it with a VF token only, and a change of its driver removes the VFs",
        passes=True,
    )
    CARRIES_VGPUS = _not_offered(
        "CarriesVgpus",
        "the GPU's vGPUs are offered in its place; a change of its driver would remove them",
        Level.OK,
        passes=True,
    )
    GIVEN_ON_DEMAND = _not_offered(
        "GivenOnDemand", "the vGPU was created on demand for a pod, and is removed when that pod has ended", Level.OK
    )
    NO_VGPUS = _not_offered("NoVgpus", "the GPU can carry vGPUs, but carries none")
    GROUP_ALLOCATED = _not_offered(
        "GroupAllocated",
        "another device of the IOMMU group is allocated to another container, by the ledger or the kubelet's"
        " checkpoint; if the checkpoint can't be read, to any container",
        Level.OK,
    )
    NAME_TAKEN = _not_offered(
        "NameTaken",
        "an alias gives the device the resource name of another kind of device; KubeVirt finds mdevs and PCI functions"
        " in different environment variables",
    )
    ALLOCATED_UNDER_OTHER_NAME = _not_offered(
        "AllocatedUnderOtherName",
        "the device is allocated to a pod as another resource, or by another device plugin under another id, such as"
        " the number of its IOMMU group",
    )
    MALFORMED_SYSFS_ENTRY = _not_offered("MalformedSysfsEntry", "an entry of sysfs does not have the expected form")
    VGPU_TYPE_UNKNOWN = _not_offered("VgpuTypeUnknown", "the catalog lacks the vGPU type of a GPU in mode `shared`")
    GPU_NOT_INITIALIZED = _not_offered("GpuNotInitialized", "NVIDIA's driver shows no UUID or no product name")
    REGISTERED_ELSEWHERE = _not_offered("RegisteredElsewhere", "another device plugin offers the GPU to the kubelet")
    IN_MIG_MODE = _not_offered("InMigMode", "the GPU has GPU instances (MIG), so its units can't be shared")
    CDI_SPEC_MISSING = _not_offered("CdiSpecMissing", "the GPU is shared, and NVIDIA's CDI specs do not have it")
    LIMIT_NOT_POSSIBLE = _not_offered(
        "LimitNotPossible",
        "shares are limits on this node, but a limit can't be set: the GPU's memory is unknown, or the library is"
        " missing. Containers do not start without their limit",
    )
    LIMIT_REQUIRED = _not_offered(
        "LimitRequired",
        "the pod requires an enforced share (`gpuvirt.io/enforcement`), but the node does not enforce shares",
    )
    WITHDRAWN = _not_offered("Withdrawn", "the device returns to the host, or its vGPU is not desired", Level.OK)
    LEAVES_AFTER_POD = _not_offered(
        "LeavesAfterPod",
        "the device is withdrawn, and its pod has several containers with devices. It stays listed as healthy until"
        " the pod has ended, because a restarted kubelet would otherwise reject the pod. No other pod gets the device",
        Level.OK,
    )

    NODE_MISSING = _unhealthy(
        "NodeMissing", "`/dev/vfio/<group>`, or the device's own node, is missing or has changed", Level.ERROR
    )
    GROUP_NOT_VIABLE = _unhealthy(
        "GroupNotViable", "a function of the IOMMU group is bound to a host driver, or is about to be"
    )
    GRACE_DRIVER_MISSING = _unhealthy(
        "GraceDriverMissing",
        "a Grace GPU is, or would be, bound to vfio-pci: only `nvgrace_gpu_vfio_pci` passes its memory to a VM. The"
        " setting `grace_without_driver` permits it",
        Level.ERROR,
    )
    BOOT_CONSOLE = _unhealthy("BootConsole", "a GPU that is bound to a VFIO driver shows the host's console")
    FELL_OFF_BUS = _unhealthy("FellOffBus", "the configuration space of the function reads as 0xffff", Level.ERROR)
    UNREAD = _unhealthy(
        "Unread",
        "a file of the host could not be read, or a program's output was not understood; it counts as unknown, not as"
        " absent",
        Level.UNKNOWN,
    )
    IN_USE_ELSEWHERE = _unhealthy("InUseElsewhere", "a process that belongs to no pod has the device open")
    NO_RESET = _unhealthy(
        "NoReset",
        "the kernel can't reset the GPU, and a pod has used it since the host booted"
        " ([below](#gpus-that-cant-be-reset)). `gpuvirt doctor` warns of such GPUs",
    )
    UNBIND_PENDING = _unhealthy(
        "UnbindPending",
        "the device is being unbound or removed, and the kernel waits until the pod or process that uses it ends",
        passes=True,
    )
    DRIVER_CHANGED = _unhealthy("DriverChanged", "the device of a pod has been bound to another driver")
    DEVICE_GONE = _unhealthy("DeviceGone", "the device of a pod has been removed from the host")
    TYPE_CHANGED = _unhealthy("TypeChanged", "the type of a pod's vGPU has changed")

    AWAITED_AFTER_REBOOT = _unhealthy(
        "AwaitedAfterReboot",
        "the device is allocated to a pod from before a reboot, and does not exist yet. It is listed as healthy, so"
        " that the kubelet admits the pod again; the container starts once the device exists",
        passes=True,
    )

    UNKNOWN_RESOURCE = _allocate("UnknownResource", "the agent does not offer the resource")
    UNKNOWN_DEVICE = _allocate("UnknownDevice", "the resource has no such device")
    IDENTITY_CHANGED = _allocate("IdentityChanged", "the card in the slot is not the card of the last observation")
    GROUP_CHANGED = _allocate(
        "GroupChanged", "the device's IOMMU group or the group's members have changed since the last observation"
    )
    NODES_CHANGED = _allocate(
        "NodesChanged",
        "the device nodes of a starting container's GPU or vGPU differ from those in the kubelet's record, which may"
        " belong to another pod's device by now",
    )

    IN_USE = _change("InUse", "a process has the device open. `--force` never takes it from a VM", passes=True)
    ALLOCATED_TO_POD = _change(
        "AllocatedToPod",
        "the device is allocated to a pod: by the kubelet's checkpoint, its pod-resources API, or the agent's ledger",
        passes=True,
    )
    ALLOCATIONS_UNKNOWN = _change(
        "AllocationsUnknown",
        "the allocations are not known: the kubelet has not answered yet, or its record could not be read"
        " ([below](#what-commands-ask-the-kubelet)). gpuvirt changes nothing that may be allocated to a pod",
        Level.UNKNOWN,
        passes=True,
    )
    ADMISSION_UNSETTLED = _change(
        "AdmissionUnsettled",
        "the kubelet has requested the device for a pod, and has neither recorded nor rejected the pod. It may be"
        " waiting for another device plugin, without a deadline. gpuvirt does not change the device until then",
        Level.UNKNOWN,
        passes=True,
    )
    ALLOCATION_UNMAPPED = _change(
        "AllocationUnmapped",
        "a device of another plugin is allocated to a pod, and neither its id nor the plugin's answer identifies a"
        " device of the host ([below](#devices-of-other-plugins)), so it may be this GPU. The GPU keeps its native"
        " driver until that pod ends",
        passes=True,
    )
    STILL_ALLOCATABLE = _change(
        "StillAllocatable",
        "the device is being returned to the host or removed, but the kubelet still counts it as allocatable, under any"
        " plugin's resource name",
        passes=True,
    )
    PROCESSES_NOT_VISIBLE = _change(
        "ProcessesNotVisible", "gpuvirt can't see all processes of the host, so a device may have unknown users"
    )
    USED_BY_HOST = _change("UsedByHost", "the GPU drives the console, a disk is in use, or a network interface is up")
    FOREIGN_ENDPOINT = _change(
        "ForeignEndpoint", "a function of another slot is in the IOMMU group, and in use by the host"
    )
    DRIVER_LOCK = _change("DriverLock", "NVIDIA's driver has clients and refuses to release the GPU", passes=True)
    DRIVER_PINNED = _change(
        "DriverPinned",
        "driverctl, or a driver_override that gpuvirt did not write, keeps the native driver from binding the function",
    )
    PREREQUISITE_MISSING = _change(
        "PrerequisiteMissing",
        "the change needs a kernel module that `modprobe -n` does not find, or a program (`sriov-manage`, `nvidia-smi`)"
        " that is not installed. The GPU keeps its driver and its vGPUs",
    )
    STEP_FAILED = _change(
        "StepFailed",
        "a step of the change failed. A GPU for VMs returns to its former driver; the return of a GPU to the host is"
        " tried again, at most every 5 minutes",
        Level.ERROR,
    )
    WRITE_BLOCKED = _change(
        "WriteBlocked",
        "a step, possibly of an agent or command that has ended, sleeps in the kernel until the device's user closes"
        " it. Allocate refuses the device",
    )
    UNIT_BUSY = _change(
        "UnitBusy",
        "another change of the isolation unit is under way, or an allocation. A device in a change is not offered, and"
        " Allocate refuses it, until that change ends",
        passes=True,
    )
    GATE_FAILED = _change(
        "GateFailed",
        "a lock file that keeps allocations and changes of a device apart can't be opened, locked or written, so"
        " gpuvirt does neither. An agent with `--plugin-only` continues without the file, and commands refuse to"
        " change the devices that it lists",
        Level.ERROR,
        passes=True,
    )
    PLAN_OUTDATED = _change(
        "PlanOutdated",
        "the desired state or the allocations have changed since the change was planned, or a step took too long. The"
        " change was stopped and rolled back, and is planned again",
        passes=True,
    )
    AGENT_SILENT = _change(
        "AgentSilent",
        "a command has asked the agent to withdraw devices from the kubelet, and the agent has not done so within 10 s",
    )
    MANAGED = _change("ManagedByAgent", "the agent manages the GPU and would undo a change by hand")

    VGPU_IN_USE = _vgpu(
        "VgpuInUse",
        "a vGPU that is no longer desired stays while it is in use; or a vGPU in use prevents a change of its GPU's"
        " mode, GPU instances or scheduler",
        passes=True,
    )
    SIZES_DIFFER = _vgpu("SizesDiffer", "vGPUs of several sizes are desired on one GPU, and `sizes: mixed` is not set")
    NO_ROOM = _vgpu("NoRoom", "more vGPUs, or more units of a GPU, are desired than fit (also by VFs or GPU instances)")
    NO_SUCH_TYPE = _vgpu("NoSuchType", "the host lists no such vGPU type for the GPU", Level.ERROR)
    NO_VGPU_HOST = _vgpu("NoVgpuHost", "the GPU's driver is a VFIO driver, or creates no vGPUs")
    VF_REJECTED_TYPE = _vgpu("VfRejectedType", "a VF rejected a type that it lists as creatable; another VF is used")
    CONFIG_INVALID = _vgpu(
        "ConfigInvalid",
        "the desired state is [invalid](#invalid-desired-state): a vGPU config that does not exist, selects no GPU of"
        " the node or can't be read, a field of the ClusterPolicy, or a node's workload label",
        Level.ERROR,
    )
    MODE_UNSUPPORTED = _vgpu(
        "ModeUnsupported",
        "the GPU has no MIG mode or no mixed-size mode, or both time-sliced and MIG-backed vGPUs are desired on it",
    )
    MODE_PENDING = _vgpu("ModePending", "MIG mode was switched, and needs a reset of the GPU or a reboot first")
    DEVICE_PLUGIN_STILL_RUNNING = _vgpu(
        "DevicePluginStillRunning",
        "another operator's device plugin (beside `nvidia-k8s-vgpu-dm`) still runs on the node, or may still run",
        passes=True,
    )

    SCHEDULER_UNFIT = _scheduler(
        "SchedulerUnfit",
        "the GPU is in MIG mode, or in mixed-size mode (for a fixed share), or the time slice is not 1 to 30 ms",
    )
    OPTION_ELSEWHERE = _scheduler(
        "OptionElsewhere",
        "the next load of the driver resets the scheduler, since another file sets `NVreg_RegistryDwordsPerDevice`",
    )

    KUBELET_AWAY = _agent("KubeletAway", "no kubelet listens at its registration socket")
    NOT_REGISTERED = _agent("NotRegistered", "the kubelet has not accepted a resource yet; the agent tries again")
    SOCKET_TAKEN = _agent("SocketTaken", "another device plugin listens at the agent's socket", Level.ERROR)
    SCAN_BLOCKED = _agent("ScanBlocked", "an observation of the host sleeps in the kernel", Level.UNKNOWN)
    SCAN_FAILED = _agent("ScanFailed", "an observation of the host failed", Level.ERROR)
    LEDGER_LOST = _agent("LedgerLost", "the ledger of allocations was damaged; the kubelet reports them")
    LEDGER_NOT_WRITTEN = _agent("LedgerNotWritten", "the ledger of allocations can't be written")
    CDI_NOT_WRITTEN = _agent("CdiNotWritten", "the CDI specs can't be written, so Kata finds no devices")
    DRIVERS_LOST = _agent(
        "DriversLost", "`drivers.json`, the driver journal, was damaged; until the next boot its overrides are unknown"
    )
    TENANCIES_LOST = _agent(
        "TenanciesLost", "`tenancy.json`, the tenants of GPUs in this boot, was damaged or deleted; they are unknown"
    )
    TENANCIES_NOT_WRITTEN = _agent(
        "TenanciesNotWritten",
        "`tenancy.json`, the tenants of GPUs, can't be written; Allocate refuses GPUs that can't be reset",
    )
    DESIRED_STATE_LOST = _agent(
        "DesiredStateLost", "`desired.json`, the desired state of vGPUs, was damaged, or can't be renamed"
    )
    DESIRED_STATE_NOT_WRITTEN = _agent("DesiredStateNotWritten", "`desired.json`, the desired state, is not writable")
    API_SERVER_AWAY = _agent("ApiServerAway", "the API server does not answer; the agent changes nothing until then")
    API_FORBIDDEN = _agent("ApiForbidden", "the API server does not permit a request of the agent")
    RESOURCE_TYPE_CHANGED = _agent(
        "ResourceTypeChanged",
        "a resource of mode `on-demand` stands for another vGPU type than before: the driver has renumbered its types",
    )
    RESOURCE_GONE = _agent(
        "ResourceGone", "pods of the node request a resource of mode `on-demand` that the node does not offer any more"
    )
    AWAITS_CONTROLLER = _agent(
        "AwaitsController",
        "a new resource is not registered yet: the controller has not reported whether KubeVirt offers it itself",
    )
    CONTROLLER_SILENT = _agent(
        "ControllerSilent", "a resource was registered without the controller's report, after 30 s"
    )

    OTHER_OPERATOR = _controller(
        "OtherOperator",
        "NVIDIA's GPU operator runs in the cluster (its lease is renewed), and the controller's options do not allow"
        " both. The controller changes nothing",
    )
    IMAGE_UNKNOWN = _controller(
        "ImageUnknown", "the controller has neither `--image` nor `GPUVIRT_IMAGE`, and a node needs it"
    )
    COMPONENTS_OFF = _controller(
        "ComponentsOff",
        "the ClusterPolicy or a label of the node disables the component that would offer its GPUs, and no other"
        " component offers them",
    )
    OS_UNKNOWN = _controller(
        "OsUnknown",
        "a driver or vGPU manager is enabled, but no label names the node's operating system, which selects the image",
    )
    POD_MISSING = _controller(
        "PodMissing",
        "an expected pod does not exist: the pod of a DaemonSet on the node (a taint may keep it away), or a VMI's"
        " virt-launcher pod (the message has KubeVirt's report)",
        Level.ERROR,
    )

    FOREIGN_PROVIDER = _kubevirt(
        "ForeignProvider",
        "KubeVirt's own plugin offers a resource of gpuvirt, or its devices under another name: their entry lacks"
        " `externalResourceProvider: true`. The agent does not register the resource until the entry has it",
    )
    CONFIG_REVERTED = _kubevirt(
        "ConfigReverted",
        "the fields that the controller wrote were reverted three times in a day. The controller does not write them"
        " again until another program or user has, and no more vGPUs are created",
    )
    KUBEVIRT_NOT_MANAGED = _kubevirt(
        "KubeVirtNotManaged",
        'a field is missing, and `gpuvirt.io/manage: "false"` or the settings forbid the controller to write it',
    )
    KUBEVIRT_STATE_UNKNOWN = _kubevirt(
        "KubeVirtStateUnknown",
        "the requests of VMs or the HyperConverged of the KubeVirt are not known yet, or KubeVirt could not be read"
        " completely. gpuvirt removes none of its entries",
    )
    KUBEVIRT_TOO_OLD = _kubevirt("KubeVirtTooOld", "this KubeVirt deletes all mediated devices that it did not create")
    RESOURCE_NOT_PERMITTED = _kubevirt(
        "ResourceNotPermitted",
        "VMs request a resource that the list of permitted devices lacks. The controller keeps its list, since without"
        " it every device would be permitted. It creates none while VMs can get such a resource from another program's"
        " device plugin, since KubeVirt would then refuse those VMs",
    )
    MDEVS_OF_KUBEVIRT = _kubevirt(
        "MdevsOfKubeVirt",
        "KubeVirt is configured to create mediated devices on nodes where gpuvirt creates vGPUs. KubeVirt creates"
        " them on each GPU that carries none, and gpuvirt offers them, too",
    )
    GRACE_GATES_MISSING = _kubevirt(
        "GraceGatesMissing",
        "a Grace GPU is not added to the list of permitted devices: KubeVirt 1.9 refuses VMs with it by its id there,"
        " until the feature gates GraceIOVirtualization, PCINUMAAwareTopology and IOMMUFD are on",
    )
    SELECTOR_TAKEN = _kubevirt(
        "SelectorTaken",
        "HCO accepts each selector only once, and entries of other resources have all spellings of this one"
        " (`10DE:26B9`, `10de:26b9` ...), or its entry is disabled",
    )
    GATE_DISABLED = _kubevirt(
        "GateDisabled",
        "a required feature gate is in `disabledFeatureGates`, and the controller does not remove it from there",
    )
    MDEV_DELETION_RISK = _kubevirt("MdevDeletionRisk", "KubeVirt would delete mediated devices, so none are created")
    RESOURCE_STILL_REFERENCED = _kubevirt(
        "ResourceStillReferenced", "VMs or pods still request the resource, so an undo keeps its entry"
    )

    HYPERVISOR_UNREACHABLE = _hypervisor(
        "HypervisorUnreachable",
        "no connection to the hypervisor could be made, or it broke. Nothing is known about any VM",
        Level.UNKNOWN,
        passes=True,
    )
    HYPERVISOR_NOT_TRUSTED = _hypervisor(
        "HypervisorNotTrusted",
        "the hypervisor's certificate is not signed by the CA of the Secret, or is for another name. gpuvirt sends no"
        " password to it, also on 127.0.0.1",
        Level.ERROR,
    )
    WRONG_CREDENTIALS = _hypervisor(
        "WrongCredentials",
        "the hypervisor refuses the user and password, or the client's certificate, of the Secret",
        Level.ERROR,
    )
    CREDENTIALS_INCOMPLETE = _hypervisor(
        "CredentialsIncomplete",
        "the Secret does not exist, or its server, CA or credentials are missing or empty",
        Level.ERROR,
    )
    HYPERVISOR_SESSION_LOST = _hypervisor(
        "HypervisorSessionLost",
        "the hypervisor ends each session immediately after the login",
        Level.UNKNOWN,
        passes=True,
    )
    HYPERVISOR_FORBIDDEN = _hypervisor(
        "HypervisorForbidden", "the hypervisor denies this request to the user of the Secret", Level.ERROR
    )
    HYPERVISOR_ANSWER_INCOMPLETE = _hypervisor(
        "HypervisorAnswerIncomplete",
        "an answer lacks required parts, or was not understood. The state of VMs counts as unknown, never as off",
        Level.UNKNOWN,
    )
    HYPERVISOR_SILENT = _hypervisor(
        "HypervisorSilent",
        "the hypervisor did not answer in time. The connection was reset; a call may have been carried out",
        Level.UNKNOWN,
        passes=True,
    )
    HYPERVISOR_CONNECTION_ENDED = _hypervisor(
        "HypervisorConnectionEnded",
        "the process that is connected to the hypervisor has ended; a call under way may have been carried out",
        Level.UNKNOWN,
        passes=True,
    )
    HYPERVISOR_REFUSED = _hypervisor(
        "HypervisorRefused", "the hypervisor refused the call; the message quotes its answer", Level.ERROR
    )
    HYPERVISOR_CALL_FAILED = _hypervisor(
        "HypervisorCallFailed",
        "the call failed within the hypervisor, which does not say whether it was carried out",
        Level.UNKNOWN,
    )
    NO_GRAPHICS_CAPACITY = _hypervisor(
        "NoGraphicsCapacity", "no GPU has room for the vGPUs of a VM that a schedule starts", Level.ERROR, passes=True
    )
    WRONG_POWER_STATE = _hypervisor(
        "WrongPowerState",
        "the VM is not in the state that the call requires: another user or program has changed it",
        passes=True,
    )
    VM_NOT_FOUND = _hypervisor("VmNotFound", "the hypervisor shows no such VM to the user of the Secret", Level.ERROR)
    GUEST_TOOLS_MISSING = _hypervisor(
        "GuestToolsMissing", "the guest can't be asked to shut down: its guest tools (VMware Tools) do not run"
    )
    SUSPEND_NOT_SUPPORTED = _hypervisor(
        "SuspendNotSupported", "the host can't suspend a VM with a vGPU of this type", Level.ERROR
    )
    VGPU_TYPE_NOT_OFFERED = _hypervisor(
        "VgpuTypeNotOffered", "the host of the VM does not list the vGPU type, so nothing is known about it"
    )
    NOT_ONE_VGPU = _hypervisor(
        "NotOneVgpu", "the vGPU type of a VM can be changed only if it has exactly one vGPU", Level.ERROR
    )
    BACK_END_MISSING = _hypervisor(
        "BackEndMissing", "the library for this kind of hypervisor, or KubeVirt, is not installed", Level.ERROR
    )
    LEASE_LOST = _hypervisor(
        "LeaseLost",
        "the controller does not lead, or has not renewed its lease, so it sends the hypervisor no requests",
        Level.UNKNOWN,
        passes=True,
    )

    UNITS_IN_KATA = _admission(
        "UnitsInKata", "the pod requests units of a shared GPU, which containers in a VM of Kata can't use", Level.ERROR
    )
    MDEV_IN_KATA = _admission(
        "MdevInKata",
        "the pod requests a mediated device, which Kata can't plug into a VM, and its class has `mdev: refuse`",
        Level.ERROR,
    )
    INJECTED_NAME_TAKEN = _admission(
        "InjectedNameTaken",
        "a container or volume of the pod has the same name as one that the webhook adds",
        Level.ERROR,
    )
    VGPU_AMOUNT_INVALID = _admission(
        "VgpuAmountInvalid", "the requested number of vGPUs, or of units of a GPU, is not a whole number", Level.ERROR
    )
    LICENCE_SECRET_INVALID = _admission(
        "LicenceSecretInvalid",
        "the annotation `gpuvirt.io/licence-secret` is not a valid name of a Secret",
        Level.ERROR,
    )
    WEBHOOK_NOT_CONFIGURED = _admission(
        "WebhookNotConfigured",
        "the webhook has not read a valid config since it started; it refuses pods of Kata until it has",
        Level.ERROR,
    )

    SCHEDULE_INVALID = _schedule(
        "ScheduleInvalid", "a field of a VgpuSchedule can't be used; nothing is done for the schedule", Level.ERROR
    )
    CRON_LINE_INVALID = _schedule(
        "CronLineInvalid",
        "`start` of a phase is not a cron line of five fields (`@daily` and seconds are not supported)",
        Level.ERROR,
    )
    TIME_ZONE_UNKNOWN = _schedule("TimeZoneUnknown", "the controller knows no time zone of this name", Level.ERROR)
    PHASE_UNREACHABLE = _schedule("PhaseUnreachable", "no day fits the cron line of a phase", Level.ERROR)
    PHASES_OVERLAP = _schedule("PhasesOverlap", "two phases of a schedule begin at the same time", Level.ERROR)
    WORKER_IN_TWO_SCHEDULES = _schedule(
        "WorkerInTwoSchedules", "a node is a worker of two VgpuSchedules; nothing is done for either", Level.ERROR
    )
    NODE_IN_TWO_SCHEDULES = _schedule(
        "NodeInTwoSchedules",
        "several VgpuSchedules set a vGPU config for a node. The node keeps its present config, and nothing is done"
        " for these schedules",
        Level.ERROR,
    )
    VGPU_CONFIG_PENDING = _schedule(
        "VgpuConfigPending",
        "the agent of a node has not applied the vGPU config of a VgpuSchedule's phase yet",
        Level.WARNING,
    )
    VGPU_CONFIG_OVERRIDDEN = _schedule(
        "VgpuConfigOverridden",
        "vgpuConfig is set in a node's GpuNode, which takes precedence over a VgpuSchedule",
        Level.WARNING,
    )
    VGPU_CONFIGS_UNKNOWN = _schedule(
        "VgpuConfigsUnknown",
        "the cluster's vGPU configs can't be read, and a phase of a VgpuSchedule names one that is not built in",
        Level.WARNING,
    )
    VM_NOT_STOPPED = _schedule(
        "VmNotStopped",
        "a VM whose vGPU a phase's vGPU config removes is not stopped (`vms: Stop`); the node waits for it",
        Level.WARNING,
        passes=True,
    )
    MODE_WITHOUT_VGPUS = _schedule(
        "ModeWithoutVgpus",
        "a VgpuSchedule has a vGPU config for a node whose mode is not vgpu, where it changes nothing",
        Level.WARNING,
    )
    PROFILE_LABEL_SELECTS = _schedule(
        "ProfileLabelSelects",
        "a profile of a VgpuSchedule sets a label by which its phases select workers",
        Level.ERROR,
    )
    PROFILE_MISSING = _schedule(
        "ProfileMissing",
        "a worker has a vGPU type in one of its phases, and no profile in another; nothing is done for the schedule",
        Level.ERROR,
    )
    WORKER_AUTOSCALED = _schedule(
        "WorkerAutoscaled",
        "a cluster autoscaler runs, and a worker is not excluded from it; nothing is done for the schedule",
        Level.ERROR,
    )
    WORKER_HEALTH_CHECKED = _schedule(
        "WorkerHealthChecked",
        "a MachineHealthCheck replaces the Machine of a worker that is away; nothing is done for the schedule",
        Level.ERROR,
    )
    MACHINE_UNKNOWN = _schedule(
        "MachineUnknown",
        "a worker is a Machine that this cluster does not show, so that its health checks are unknown",
        Level.UNKNOWN,
    )
    COVERAGE_UNKNOWN = _schedule(
        "CoverageUnknown",
        "the controller may not read whether a cluster autoscaler or a MachineHealthCheck covers workers",
        Level.UNKNOWN,
    )
    SUSPENDED_WITH_TYPE = _schedule(
        "SuspendedWithType",
        "a worker's VM is suspended with the vGPU type of another phase, which can't be changed until it is off",
        Level.ERROR,
    )
    SCHEDULE_NOT_ALLOWED = _schedule(
        "NotAllowed",
        "a VgpuSchedule is not in the controller's namespace, the only one in which the controller reads Secrets and"
        " runs schedules",
        Level.ERROR,
    )
    HYPERVISOR_UNKNOWN = _schedule(
        "HypervisorUnknown",
        "the hypervisor gave no complete answer. No VM counts as off, and no call is made",
        Level.UNKNOWN,
        passes=True,
    )
    VM_NOT_MATCHED = _schedule(
        "VmNotMatched",
        "no VM, or more than one, is proven to be a worker's node, by system UUID or provider ID; on KubeVirt by system"
        " UUID and IP address, or by the node's annotation `gpuvirt.io/vm`",
        Level.ERROR,
    )
    VM_NOT_VISIBLE = _schedule(
        "VmNotVisible", "the hypervisor no longer shows the VM of a worker; it does not count as off", Level.ERROR
    )
    NODE_NOT_REGISTERED = _schedule("NodeNotRegistered", "the Node object of a worker does not exist", passes=True)
    WORKER_LABELS_LOST = _schedule(
        "WorkerLabelsLost",
        "a worker's Node was deleted, and registered again without the labels of its phase",
        Level.ERROR,
    )
    POD_BLOCKS_DRAIN = _schedule(
        "PodBlocksDrain",
        "a pod of a worker has no controller, or has an emptyDir volume; `kubectl drain` would refuse it, too",
        passes=True,
    )
    PODS_LEFT = _schedule(
        "PodsLeft", "pods of a worker have not ended yet, or a budget forbids their eviction", passes=True
    )
    VOLUMES_ATTACHED = _schedule("VolumesAttached", "volumes are still attached to a worker", passes=True)
    GPU_STILL_USED = _schedule(
        "GpuStillUsed",
        "a worker waits for the GPU: the VM of a worker of another phase is not known to be off",
        passes=True,
    )
    RIGHT_MISSING = _schedule(
        "RightMissing",
        "the API server does not permit a request that the schedule needs of the controller",
        Level.ERROR,
    )
    PHASE_GIVEN_UP = _schedule(
        "PhaseGivenUp", "a phase could not be reached before its end, so the phase before it was restored", Level.ERROR
    )
    OTHERS_STAY = _schedule(
        "OthersStay",
        "a worker is not drained, because the VM of another one that has to leave, too, can't",
        passes=True,
    )
    STEP_PENDING = _schedule("StepPending", "a step of a worker has not taken effect yet", Level.OK, passes=True)
    CALL_REFUSED = _schedule("CallRefused", "the hypervisor has refused a call for a worker's VM", Level.ERROR)
    NO_HEARTBEAT = _schedule(
        "NoHeartbeat", "a worker's VM runs, but its kubelet has not renewed its Lease, or is not Ready", passes=True
    )
    CLOCK_SKEWED = _schedule(
        "ClockSkewed", "the clock of a resumed worker differs from the controller's by more than 30 s"
    )
