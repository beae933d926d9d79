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
        "the function has no driver, or one that only reserves it (`pci-stub`). On a host with NVSwitches an admin must"
        " probe the native driver, which may hang",
    )
    NO_IOMMU_GROUP = _not_offered(
        "NoIommuGroup",
        "the device is in no IOMMU group: the IOMMU is off, or the kernel has no `VFIO_GROUP` (for an mdev)",
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
        "the GPU has VFs: a VM needs a VF token to open it, and a change of its driver removes them",
        passes=True,
    )
    CARRIES_VGPUS = _not_offered(
        "CarriesVgpus",
        "the GPU's vGPUs are offered in its place; a change of its driver would remove them",
        Level.OK,
        passes=True,
    )
    GIVEN_ON_DEMAND = _not_offered(
        "GivenOnDemand", "the vGPU was created on demand for a pod, and ends with it", Level.OK
    )
    OFFERED_TO_CLAIMS = _not_offered(
        "OfferedToClaims", "ResourceClaims (DRA) get the GPU, so that no device plugin offers it", Level.OK
    )
    NO_VGPUS = _not_offered("NoVgpus", "the GPU can carry vGPUs, but carries none")
    GROUP_ALLOCATED = _not_offered(
        "GroupAllocated",
        "another container has, or may have, another device of the IOMMU group",
        Level.OK,
    )
    NAME_TAKEN = _not_offered(
        "NameTaken",
        "an alias gives the device the resource name of another kind of device",
    )
    ALLOCATED_UNDER_OTHER_NAME = _not_offered(
        "AllocatedUnderOtherName",
        "a pod has the device as another resource, or by another id, such as its IOMMU group's number",
    )
    MALFORMED_SYSFS_ENTRY = _not_offered("MalformedSysfsEntry", "an entry of sysfs does not have the expected form")
    VGPU_TYPE_UNKNOWN = _not_offered("VgpuTypeUnknown", "the catalog lacks the vGPU type of a GPU in mode `shared`")
    GPU_NOT_INITIALIZED = _not_offered("GpuNotInitialized", "NVIDIA's driver shows no UUID or no product name")
    REGISTERED_ELSEWHERE = _not_offered("RegisteredElsewhere", "another device plugin offers the GPU to the kubelet")
    DRIVER_UPGRADE = _not_offered(
        "DriverUpgrade",
        "the driver of the node is being replaced, so that GPUs in mode `shared` give no units to more pods",
        passes=True,
    )
    IN_MIG_MODE = _not_offered("InMigMode", "the GPU has GPU instances (MIG), so its units can't be shared")
    CDI_SPEC_MISSING = _not_offered("CdiSpecMissing", "the GPU is shared, and NVIDIA's CDI specs do not have it")
    LIMIT_NOT_POSSIBLE = _not_offered(
        "LimitNotPossible",
        "shares are limits on this node, but the GPU's memory is unknown, or what limits it is missing: the library,"
        " the daemon, or a driver that can. Containers do not start without their limit",
    )
    LIMIT_REQUIRED = _not_offered(
        "LimitRequired",
        "the pod requires an enforced share, but the node does not enforce shares",
    )
    NO_LIMIT_HOLDS = _not_offered(
        "NoLimitHolds",
        "the pod requires an enforced share (`gpuvirt.io/enforcement`), and no limit can hold in it: a container is"
        " privileged, or has hostPID and SYS_ADMIN, or the handler of its RuntimeClass is that of another kernel",
    )
    WITHDRAWN = _not_offered("Withdrawn", "the device returns to the host, or its vGPU is not desired", Level.OK)
    LEAVES_AFTER_POD = _not_offered(
        "LeavesAfterPod",
        "the device is withdrawn, but stays listed as healthy until its pod has ended: otherwise a restarted"
        " kubelet would reject the pod. No other pod gets the device",
        Level.OK,
    )

    NODE_MISSING = _unhealthy("NodeMissing", "the device's node in `/dev/vfio` is missing or has changed", Level.ERROR)
    GROUP_NOT_VIABLE = _unhealthy(
        "GroupNotViable", "a function of the IOMMU group is, or will be, bound to a host driver", Level.ERROR
    )
    GRACE_DRIVER_MISSING = _unhealthy(
        "GraceDriverMissing",
        "a Grace GPU is, or would be, on vfio-pci: only `nvgrace_gpu_vfio_pci` passes its memory to a VM. The"
        " setting `grace_without_driver` permits it",
        Level.ERROR,
    )
    BOOT_CONSOLE = _unhealthy("BootConsole", "a GPU on a VFIO driver shows the host's console")
    FELL_OFF_BUS = _unhealthy("FellOffBus", "the configuration space of the function reads as 0xffff", Level.ERROR)
    BAR_UNASSIGNED = _unhealthy("BarUnassigned", "the firmware found no address for a GPU's memory", Level.ERROR)
    UNREAD = _unhealthy(
        "Unread",
        "a file could not be read, or a program's output was not understood; the value is unknown, not absent",
        Level.UNKNOWN,
    )
    IN_USE_ELSEWHERE = _unhealthy("InUseElsewhere", "a process that belongs to no pod has the device open")
    NO_RESET = _unhealthy(
        "NoReset",
        "the kernel can't reset the GPU, and a pod has used it since the host booted"
        " ([below](#gpus-that-cant-be-reset))",
    )
    UNBIND_PENDING = _unhealthy(
        "UnbindPending",
        "the device is being unbound or removed, and the kernel waits for its user to end",
        passes=True,
    )
    DRIVER_CHANGED = _unhealthy("DriverChanged", "the device of a pod has been bound to another driver")
    DEVICE_GONE = _unhealthy("DeviceGone", "the device of a pod has been removed from the host")
    TYPE_CHANGED = _unhealthy("TypeChanged", "the type of a pod's vGPU has changed")

    AWAITED_AFTER_REBOOT = _unhealthy(
        "AwaitedAfterReboot",
        "the device of a pod from before a reboot does not exist yet. It is listed as healthy, so that the"
        " kubelet admits the pod again; the container starts once the device exists",
        passes=True,
    )

    UNKNOWN_RESOURCE = _allocate("UnknownResource", "the agent does not offer the resource")
    UNKNOWN_DEVICE = _allocate("UnknownDevice", "the resource has no such device")
    CLAIM_UNKNOWN = _allocate(
        "ClaimUnknown",
        "the API server has no such ResourceClaim, has given it no GPU here, or could not be asked",
        passes=True,
    )
    CLAIM_INVALID = _allocate(
        "ClaimInvalid", "a ResourceClaim asks for what gpuvirt does not have: a configuration, adminAccess, or a shape"
    )
    CLAIM_WAITS = _allocate(
        "ClaimWaits",
        "the GPU of a ResourceClaim is being converted, another claim still has it, or a process does",
        passes=True,
    )
    CLAIM_NOT_WRITTEN = _allocate(
        "ClaimNotWritten", "the record, the CDI spec or the metadata of a ResourceClaim can't be written", passes=True
    )
    CLAIMS_NOT_POSSIBLE = _agent(
        "ClaimsNotPossible",
        "a GPU in mode `claims` is not published: Kubernetes is too old or lacks a gate, another driver has the GPU, or"
        " the GPU lacks the shape",
    )
    IDENTITY_CHANGED = _allocate("IdentityChanged", "the card in the slot is not the card of the last observation")
    GROUP_CHANGED = _allocate(
        "GroupChanged", "the device's IOMMU group or its members have changed since the last observation"
    )
    NODES_CHANGED = _allocate(
        "NodesChanged",
        "the device nodes in the kubelet's record of the container are not those of its device, and may belong to"
        " another pod's",
    )

    IN_USE = _change("InUse", "a process has the device open. `--force` never takes it from a VM", passes=True)
    ALLOCATED_TO_POD = _change(
        "AllocatedToPod",
        "a pod has the device, by the kubelet's checkpoint, its pod-resources API, or the agent's ledger",
        passes=True,
    )
    ALLOCATIONS_UNKNOWN = _change(
        "AllocationsUnknown",
        "the kubelet has not answered yet, or its record could not be read"
        " ([below](#what-commands-ask-the-kubelet)). gpuvirt changes nothing that a pod may have",
        Level.UNKNOWN,
        passes=True,
    )
    ADMISSION_UNSETTLED = _change(
        "AdmissionUnsettled",
        "the kubelet has requested the device for a pod, and has neither recorded nor rejected the pod. It may be"
        " waiting for another device plugin, without a deadline",
        Level.UNKNOWN,
        passes=True,
    )
    ALLOCATION_UNMAPPED = _change(
        "AllocationUnmapped",
        "a pod has a device of another plugin that may be this GPU ([below](#devices-of-other-plugins)). The GPU"
        " keeps its native driver until that pod ends",
        passes=True,
    )
    STILL_ALLOCATABLE = _change(
        "StillAllocatable",
        "the device is being withdrawn, but the kubelet still counts it as allocatable, under any plugin's"
        " resource name",
        passes=True,
    )
    PROCESSES_NOT_VISIBLE = _change(
        "ProcessesNotVisible", "gpuvirt can't see all processes of the host, so a device may have unknown users"
    )
    USED_BY_HOST = _change("UsedByHost", "the GPU drives the console, a disk is in use, or a network interface is up")
    FOREIGN_ENDPOINT = _change("ForeignEndpoint", "the host uses a function of another slot in the IOMMU group")
    DRIVER_LOCK = _change("DriverLock", "NVIDIA's driver has clients and refuses to release the GPU", passes=True)
    DRIVER_PINNED = _change(
        "DriverPinned",
        "driverctl, or another's driver_override, keeps the native driver from binding the function",
    )
    PREREQUISITE_MISSING = _change(
        "PrerequisiteMissing",
        "a kernel module or a program (`sriov-manage`, `nvidia-smi`) that the change needs is missing. The GPU"
        " keeps its driver and its vGPUs",
    )
    VFIO_MISSING = _change("VfioMissing", "this kernel has no vfio-pci", Level.ERROR)
    VFIO_BLOCKED = _change("VfioBlocked", "modprobe or the kernel is configured not to load vfio-pci", Level.ERROR)
    STEP_FAILED = _change(
        "StepFailed",
        "a step of the change failed. A GPU for VMs returns to its former driver; the return of a GPU to the host is"
        " tried again, at most every 5 minutes",
        Level.ERROR,
    )
    WRITE_BLOCKED = _change(
        "WriteBlocked",
        "a step, possibly of an ended process, sleeps in the kernel until the device's user closes it. Allocate"
        " refuses the device",
    )
    UNIT_BUSY = _change(
        "UnitBusy",
        "another change, or an allocation, of the isolation unit is under way. Until it ends, its devices are not"
        " offered or allocated",
        passes=True,
    )
    GATE_FAILED = _change(
        "GateFailed",
        "a lock file of the device can't be opened, locked or written, so gpuvirt neither allocates nor changes"
        " it. An agent with `--plugin-only` continues without the file, and commands refuse to change the devices"
        " that it lists",
        Level.ERROR,
        passes=True,
    )
    PLAN_OUTDATED = _change(
        "PlanOutdated",
        "the desired state or the allocations have changed since the change was planned, or a step took too long."
        " The change is rolled back, and planned again",
        passes=True,
    )
    AGENT_SILENT = _change(
        "AgentSilent",
        "the agent has not withdrawn devices within 10 s after a command asked it to",
    )
    MANAGED = _change("ManagedByAgent", "the agent manages the GPU and would undo a change by hand")

    VGPU_IN_USE = _vgpu(
        "VgpuInUse",
        "a vGPU in use stays, or prevents a change of its GPU's mode, GPU instances or scheduler",
        passes=True,
    )
    SIZES_DIFFER = _vgpu("SizesDiffer", "vGPUs of several sizes are desired on one GPU without `sizes: mixed`")
    NO_ROOM = _vgpu("NoRoom", "more vGPUs, or units of a GPU, are desired than fit (also by VFs or GPU instances)")
    NO_SUCH_TYPE = _vgpu("NoSuchType", "the host lists no such vGPU type for the GPU", Level.ERROR)
    NO_VGPU_HOST = _vgpu(
        "NoVgpuHost", "the GPU's driver is a VFIO driver, or creates no vGPUs; a driver that is not loaded may not"
    )
    VF_REJECTED_TYPE = _vgpu("VfRejectedType", "a VF rejected a type that it lists as creatable; another VF is used")
    CONFIG_INVALID = _vgpu(
        "ConfigInvalid",
        "the desired state is [invalid](#invalid-desired-state)",
        Level.ERROR,
    )
    MODE_UNSUPPORTED = _vgpu(
        "ModeUnsupported",
        "the GPU has no MIG mode or no mixed-size mode, or both time-sliced and MIG-backed vGPUs are desired on it",
    )
    MODE_PENDING = _vgpu("ModePending", "the switch of MIG mode needs a reset of the GPU or a reboot")
    DEVICE_PLUGIN_STILL_RUNNING = _vgpu(
        "DevicePluginStillRunning",
        "another operator's device plugin (beside `nvidia-k8s-vgpu-dm`) runs, or may run, on the node",
        passes=True,
    )

    SCHEDULER_UNFIT = _scheduler(
        "SchedulerUnfit",
        "the GPU is in MIG mode, or in mixed-size mode (for a fixed share), or the time slice is not 1 to 30 ms",
    )
    OPTION_ELSEWHERE = _scheduler(
        "OptionElsewhere",
        "another file sets `NVreg_RegistryDwordsPerDevice`, so the next load of the driver resets the scheduler",
    )

    KUBELET_AWAY = _agent("KubeletAway", "no kubelet listens at its registration socket")
    NOT_REGISTERED = _agent("NotRegistered", "the kubelet has not accepted a resource yet; the agent tries again")
    SOCKET_TAKEN = _agent("SocketTaken", "another device plugin listens at the agent's socket", Level.ERROR)
    SCAN_BLOCKED = _agent("ScanBlocked", "an observation of the host sleeps in the kernel", Level.UNKNOWN)
    SCAN_FAILED = _agent("ScanFailed", "an observation of the host failed", Level.ERROR)
    GPU_GONE = _agent("GpuGone", "a GPU that the GpuNode listed has disappeared from the host", Level.ERROR)
    LEDGER_LOST = _agent("LedgerLost", "the ledger of allocations was damaged; the kubelet reports them")
    LEDGER_NOT_WRITTEN = _agent("LedgerNotWritten", "the ledger of allocations can't be written")
    CDI_NOT_WRITTEN = _agent("CdiNotWritten", "the CDI specs can't be written, so Kata finds no devices")
    DRIVERS_LOST = _agent(
        "DriversLost", "the driver journal `drivers.json` was damaged; until the next boot its overrides are unknown"
    )
    TENANCIES_LOST = _agent(
        "TenanciesLost", "`tenancy.json` was damaged or deleted; the tenants of GPUs in this boot are unknown"
    )
    TENANCIES_NOT_WRITTEN = _agent(
        "TenanciesNotWritten",
        "`tenancy.json` can't be written; Allocate refuses GPUs that can't be reset",
    )
    DESIRED_STATE_LOST = _agent("DesiredStateLost", "`desired.json` was damaged, or can't be renamed")
    DESIRED_STATE_NOT_WRITTEN = _agent("DesiredStateNotWritten", "`desired.json` can't be written")
    API_SERVER_AWAY = _agent("ApiServerAway", "the API server does not answer; the agent changes nothing until then")
    API_FORBIDDEN = _agent("ApiForbidden", "the API server does not permit a request of the agent")
    RESOURCE_TYPE_CHANGED = _agent(
        "ResourceTypeChanged",
        "the driver has renumbered its types: a resource of mode `on-demand` stands for another vGPU type than before",
    )
    RESOURCE_GONE = _agent(
        "ResourceGone", "pods request a resource of mode `on-demand` that the node does not offer any more"
    )
    AWAITS_CONTROLLER = _agent(
        "AwaitsController",
        "a new resource is not registered until the controller has reported whether KubeVirt offers it itself",
    )
    CONTROLLER_SILENT = _agent(
        "ControllerSilent", "a resource was registered after 30 s without the controller's report"
    )

    OTHER_OPERATOR = _controller(
        "OtherOperator",
        "NVIDIA's GPU operator runs in the cluster (its lease is renewed), without `--coexist`",
    )
    IMAGE_UNKNOWN = _controller(
        "ImageUnknown", "a node needs an image: the controller has neither `--image` nor `GPUVIRT_IMAGE`"
    )
    COMPONENTS_OFF = _controller(
        "ComponentsOff",
        "the ClusterPolicy or a label of the node disables the component that would offer its GPUs",
    )
    OS_UNKNOWN = _controller(
        "OsUnknown",
        "a driver or vGPU manager is enabled, but no label names the node's operating system, which selects the image",
    )
    POD_MISSING = _controller(
        "PodMissing",
        "an expected pod does not exist: of a DaemonSet on the node (a taint may keep it away), or a VMI's"
        " virt-launcher",
        Level.ERROR,
    )

    FOREIGN_PROVIDER = _kubevirt(
        "ForeignProvider",
        "KubeVirt's own plugin offers gpuvirt's resource or devices, whose entry lacks `externalResourceProvider:"
        " true`. The agent does not register the resource until the entry has it",
    )
    CONFIG_REVERTED = _kubevirt(
        "ConfigReverted",
        "the controller's fields were reverted three times in a day. The controller does not write them again"
        " until another client has, and no more vGPUs are created",
    )
    KUBEVIRT_NOT_MANAGED = _kubevirt(
        "KubeVirtNotManaged",
        'a field is missing, and `gpuvirt.io/manage: "false"` or the settings forbid the controller to write it',
    )
    KUBEVIRT_STATE_UNKNOWN = _kubevirt(
        "KubeVirtStateUnknown",
        "the requests of VMs, the HyperConverged or a part of the KubeVirt are unknown. gpuvirt removes none of"
        " its entries",
    )
    KUBEVIRT_TOO_OLD = _kubevirt("KubeVirtTooOld", "this KubeVirt deletes all mediated devices that it did not create")
    RESOURCE_NOT_PERMITTED = _kubevirt(
        "ResourceNotPermitted",
        "VMs request a resource that the list of permitted devices lacks. The controller keeps its list, without"
        " which every device would be permitted, and creates none while VMs can get such a resource from another"
        " device plugin",
    )
    MDEVS_OF_KUBEVIRT = _kubevirt(
        "MdevsOfKubeVirt",
        "KubeVirt is configured to create mediated devices where gpuvirt creates vGPUs. It creates them on each"
        " GPU without any, and gpuvirt offers them, too",
    )
    GRACE_GATES_MISSING = _kubevirt(
        "GraceGatesMissing",
        "a Grace GPU is not added to the permitted devices: KubeVirt 1.9 then refuses VMs with it until the"
        " feature gates GraceIOVirtualization, PCINUMAAwareTopology and IOMMUFD are on",
    )
    SELECTOR_TAKEN = _kubevirt(
        "SelectorTaken",
        "HCO accepts each selector only once, and entries of other resources have all spellings of this one, or"
        " its entry is disabled",
    )
    GATE_DISABLED = _kubevirt(
        "GateDisabled",
        "a required feature gate is in `disabledFeatureGates`; the controller leaves it there",
    )
    MDEV_DELETION_RISK = _kubevirt("MdevDeletionRisk", "KubeVirt would delete mediated devices, so none are created")
    RESOURCE_STILL_REFERENCED = _kubevirt(
        "ResourceStillReferenced", "VMs or pods still request the resource, so an undo keeps its entry"
    )

    HYPERVISOR_UNREACHABLE = _hypervisor(
        "HypervisorUnreachable",
        "no connection could be made, or it broke. Nothing is known about any VM",
        Level.UNKNOWN,
        passes=True,
    )
    HYPERVISOR_NOT_TRUSTED = _hypervisor(
        "HypervisorNotTrusted",
        "the certificate is not signed by the CA of the Secret, or is for another name. gpuvirt sends no"
        " password, also on 127.0.0.1",
        Level.ERROR,
    )
    WRONG_CREDENTIALS = _hypervisor(
        "WrongCredentials",
        "the hypervisor refuses the user and password, or the client's certificate",
        Level.ERROR,
    )
    CREDENTIALS_INCOMPLETE = _hypervisor(
        "CredentialsIncomplete",
        "the Secret does not exist, or its server, CA or credentials are missing or empty",
        Level.ERROR,
    )
    HYPERVISOR_SESSION_LOST = _hypervisor(
        "HypervisorSessionLost",
        "the hypervisor ends each session right after the login",
        Level.UNKNOWN,
        passes=True,
    )
    HYPERVISOR_FORBIDDEN = _hypervisor(
        "HypervisorForbidden", "the hypervisor denies this request to the user of the Secret", Level.ERROR
    )
    HYPERVISOR_ANSWER_INCOMPLETE = _hypervisor(
        "HypervisorAnswerIncomplete",
        "an answer lacks required parts, or was not understood. The state of VMs is unknown, never off",
        Level.UNKNOWN,
    )
    HYPERVISOR_SILENT = _hypervisor(
        "HypervisorSilent",
        "no answer came in time, and the connection was reset; a call may have been carried out",
        Level.UNKNOWN,
        passes=True,
    )
    HYPERVISOR_CONNECTION_ENDED = _hypervisor(
        "HypervisorConnectionEnded",
        "the process that has the connection has ended; a call may have been carried out",
        Level.UNKNOWN,
        passes=True,
    )
    HYPERVISOR_REFUSED = _hypervisor("HypervisorRefused", "the hypervisor refused the call", Level.ERROR)
    HYPERVISOR_CALL_FAILED = _hypervisor(
        "HypervisorCallFailed",
        "the call failed within the hypervisor; it may have been carried out",
        Level.UNKNOWN,
    )
    NO_GRAPHICS_CAPACITY = _hypervisor(
        "NoGraphicsCapacity", "no GPU has room for the vGPUs of a VM that a schedule starts", Level.ERROR, passes=True
    )
    WRONG_POWER_STATE = _hypervisor(
        "WrongPowerState",
        "another client has changed the VM, which is not in the state that the call requires",
        passes=True,
    )
    VM_NOT_FOUND = _hypervisor("VmNotFound", "the hypervisor shows no such VM to the user of the Secret", Level.ERROR)
    GUEST_TOOLS_MISSING = _hypervisor(
        "GuestToolsMissing", "the guest can't be asked to shut down: its guest tools do not run"
    )
    SUSPEND_NOT_SUPPORTED = _hypervisor(
        "SuspendNotSupported", "the host can't suspend a VM with a vGPU of this type", Level.ERROR
    )
    VGPU_TYPE_NOT_OFFERED = _hypervisor(
        "VgpuTypeNotOffered", "the VM's host does not list the vGPU type, so nothing is known about it"
    )
    NOT_ONE_VGPU = _hypervisor(
        "NotOneVgpu", "the vGPU type of a VM can be changed only if it has exactly one vGPU", Level.ERROR
    )
    BACK_END_MISSING = _hypervisor(
        "BackEndMissing", "the library for this hypervisor, or KubeVirt, is not installed", Level.ERROR
    )
    LEASE_LOST = _hypervisor(
        "LeaseLost",
        "the controller does not lead, or has not renewed its lease, so it sends no requests",
        Level.UNKNOWN,
        passes=True,
    )

    UNITS_IN_KATA = _admission(
        "UnitsInKata", "the pod requests units of a shared GPU, which containers in a VM of Kata can't use", Level.ERROR
    )
    MDEV_IN_KATA = _admission(
        "MdevInKata",
        "the pod requests a mediated device, which Kata can't plug, and its class has `mdev: refuse`",
        Level.ERROR,
    )
    INJECTED_NAME_TAKEN = _admission(
        "InjectedNameTaken",
        "a container or volume of the pod has the name of one that the webhook adds",
        Level.ERROR,
    )
    VGPU_AMOUNT_INVALID = _admission(
        "VgpuAmountInvalid", "the requested number of vGPUs, or of units, is not a whole number", Level.ERROR
    )
    LICENCE_SECRET_INVALID = _admission(
        "LicenceSecretInvalid",
        "the annotation `gpuvirt.io/licence-secret` is not a valid name of a Secret",
        Level.ERROR,
    )
    ANNOTATION_INVALID = _admission(
        "AnnotationInvalid", "an annotation of the pod under `gpuvirt.io/` has an unknown key or value", Level.ERROR
    )
    WEBHOOK_NOT_CONFIGURED = _admission(
        "WebhookNotConfigured",
        "the webhook has not read a valid config since it started",
        Level.ERROR,
    )
    CLASS_NOT_CONFIGURED = _admission(
        "ClassNotConfigured",
        "the webhook has not read yet what pods of the pod's RuntimeClass get, for up to 2 minutes after its config has"
        " changed",
        Level.ERROR,
    )

    SCHEDULE_INVALID = _schedule("ScheduleInvalid", "a field of the VgpuSchedule can't be used", Level.ERROR)
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
        "several VgpuSchedules set a vGPU config for a node, which keeps its present config",
        Level.ERROR,
    )
    VGPU_CONFIG_PENDING = _schedule(
        "VgpuConfigPending",
        "the node's agent has not applied the vGPU config of the phase yet",
        Level.WARNING,
    )
    VGPU_CONFIG_OVERRIDDEN = _schedule(
        "VgpuConfigOverridden",
        "the node's GpuNode has a vgpuConfig of another client, which takes precedence",
        Level.WARNING,
    )
    VGPU_CONFIGS_UNKNOWN = _schedule(
        "VgpuConfigsUnknown",
        "the cluster's vGPU configs can't be read, and a phase names one that is not built in",
        Level.WARNING,
    )
    VM_NOT_STOPPED = _schedule(
        "VmNotStopped",
        "a VM whose vGPU is to be removed is not stopped (`vms: Stop`); the node waits for it",
        Level.WARNING,
        passes=True,
    )
    MODE_WITHOUT_VGPUS = _schedule(
        "ModeWithoutVgpus",
        "a node with a vGPU config is not in mode `vgpu`, so the config changes nothing",
        Level.WARNING,
    )
    PROFILE_LABEL_SELECTS = _schedule(
        "ProfileLabelSelects",
        "a profile sets a label by which phases select workers",
        Level.ERROR,
    )
    PROFILE_MISSING = _schedule(
        "ProfileMissing",
        "a worker has a vGPU type in one of its phases, and no profile in another",
        Level.ERROR,
    )
    WORKER_AUTOSCALED = _schedule(
        "WorkerAutoscaled",
        "a cluster autoscaler runs, and does not exclude a worker",
        Level.ERROR,
    )
    WORKER_HEALTH_CHECKED = _schedule(
        "WorkerHealthChecked",
        "a MachineHealthCheck replaces the Machine of a worker that is away",
        Level.ERROR,
    )
    MACHINE_UNKNOWN = _schedule(
        "MachineUnknown",
        "a worker is a Machine that this cluster does not show, so its health checks are unknown",
        Level.UNKNOWN,
    )
    COVERAGE_UNKNOWN = _schedule(
        "CoverageUnknown",
        "the controller may not read whether a cluster autoscaler or a MachineHealthCheck covers workers",
        Level.UNKNOWN,
    )
    SUSPENDED_WITH_TYPE = _schedule(
        "SuspendedWithType",
        "a worker's VM is suspended with another phase's vGPU type, which can't be changed until it is off",
        Level.ERROR,
    )
    SCHEDULE_NOT_ALLOWED = _schedule(
        "NotAllowed",
        "the VgpuSchedule is not in the controller's namespace",
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
        "no VM, or more than one, is [proven](../hypervisors.md#the-vm-of-a-node) to be a worker's node",
        Level.ERROR,
    )
    VM_NOT_VISIBLE = _schedule(
        "VmNotVisible", "the hypervisor no longer shows a worker's VM, which does not count as off", Level.ERROR
    )
    NODE_NOT_REGISTERED = _schedule("NodeNotRegistered", "the Node object of a worker does not exist", passes=True)
    WORKER_LABELS_LOST = _schedule(
        "WorkerLabelsLost",
        "a worker's Node was registered again without the labels of its phase",
        Level.ERROR,
    )
    POD_BLOCKS_DRAIN = _schedule(
        "PodBlocksDrain",
        "a pod of a worker has no controller, or has an emptyDir volume",
        passes=True,
    )
    PODS_LEFT = _schedule(
        "PodsLeft", "pods of a worker have not ended yet, or a budget forbids their eviction", passes=True
    )
    VOLUMES_ATTACHED = _schedule("VolumesAttached", "volumes are still attached to a worker", passes=True)
    GPU_STILL_USED = _schedule(
        "GpuStillUsed",
        "a worker waits for the GPU: a VM of another phase is not known to be off",
        passes=True,
    )
    RIGHT_MISSING = _schedule(
        "RightMissing",
        "the API server denies the controller a request that the schedule needs",
        Level.ERROR,
    )
    PHASE_GIVEN_UP = _schedule(
        "PhaseGivenUp", "a phase could not be reached before its end, so the phase before it was restored", Level.ERROR
    )
    OTHERS_STAY = _schedule(
        "OthersStay",
        "a worker is not drained, because another VM that has to leave can't",
        passes=True,
    )
    STEP_PENDING = _schedule("StepPending", "a step of a worker has not taken effect yet", Level.OK, passes=True)
    CALL_REFUSED = _schedule("CallRefused", "the hypervisor has refused a call for a worker's VM", Level.ERROR)
    NO_HEARTBEAT = _schedule(
        "NoHeartbeat", "a worker's VM runs, but its kubelet has not renewed its Lease, or is not Ready", passes=True
    )
    CLOCK_SKEWED = _schedule("ClockSkewed", "the clock of a resumed worker is over 30 s away from the controller's")
