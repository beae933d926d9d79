"""The catalogue of findings of `gpuvirt doctor` and `gpuvirt why`: problems of hosts, clusters, VMs and pods."""

from functools import partial

from gpuvirt.model.reasons.codes import Code, Level, Topic, entry

_host = partial(entry, Topic.HOST)
_workload = partial(entry, Topic.WORKLOAD, level=Level.ERROR)


class FindingCode(Code):
    """A problem of a host, a cluster, a VM or a pod; problems of devices have a ReasonCode."""

    NO_VIRTUALIZATION = _host("NoVirtualization", "the processor shows neither vmx nor svm", Level.ERROR)
    HOST_IS_VM = _host("HostIsVm", "the host is itself a VM, without a virtual IOMMU")
    KVM_MISSING = _host("KvmMissing", "`/dev/kvm` does not exist", Level.ERROR)
    IOMMU_OFF = _host(
        "IommuOff",
        "the host has no IOMMU group: the IOMMU is off in the firmware or by the kernel's command line",
        Level.ERROR,
    )
    KERNEL_ARGUMENT = _host("KernelArgument", "a kernel argument disables the drivers of GPUs (`nomodeset`)")
    INTERRUPTS_NOT_REMAPPED = _host(
        "InterruptsNotRemapped",
        "no interrupt goes through a chip that remaps (`/sys/kernel/irq/*/chip_name`), so vfio refuses devices; a"
        " warning where `allow_unsafe_interrupts` is set",
        Level.ERROR,
    )
    UNSAFE_INTERRUPTS = _host(
        "UnsafeInterrupts", "vfio accepts interrupts without remapping (`allow_unsafe_interrupts`)"
    )
    SHARED_GROUP = _host("SharedGroup", "a GPU shares its IOMMU group with devices of other slots")
    ACS_OVERRIDE = _host("AcsOverride", "`pcie_acs_override` splits groups that the hardware does not isolate")

    IDS_NOT_BOUND = _host(
        "IdsNotBound", "vfio-pci is configured for a device's id, but another driver bound the device first"
    )
    DRIVERS_FIGHT = _host(
        "DriversFight", "a GPU is bound to nouveau; a warning where nouveau is only loaded beside nvidia", Level.ERROR
    )
    DRIVER_UNFIT = _host("DriverUnfit", "NVIDIA's driver on the host no longer supports a GPU", Level.ERROR)

    NO_VGPU_TYPES = _host("NoVgpuTypes", "a GPU is set up for vGPUs but lists no vGPU type")
    VFS_OFF = _host("VfsOff", "the vGPU manager runs, but a GPU's VFs are off")

    KUBELET_NOT_LISTENING = _host(
        "KubeletNotListening", "a kubelet has run on this host, but does not listen at its socket", Level.ERROR
    )
    AGENT_AWAY = _host("AgentAway", "a kubelet runs on the host, but no agent")
    COUNTS_DIFFER = _host("CountsDiffer", "the kubelet counts other devices than the agent reports as healthy")
    NUMA_NOT_ALIGNED = _host(
        "NumaNotAligned", "GPUs are on several NUMA nodes, but the kubelet does not align processors with them"
    )
    CPUS_ON_OTHER_NODE = _host("CpusOnOtherNode", "a VM may run on no processor of its GPU's NUMA node")

    CDI_OFF = _host(
        "CdiOff",
        "`cdi: answers` is set or GPUs are shared, but the container runtime has CDI off; a warning if uncertain",
        Level.ERROR,
    )
    KATA_CDI_SPEC = _host(
        "KataCdiSpec",
        "a CDI spec can't be parsed, is newer than a Kata runtime reads, or defines a device twice, so that Kata"
        " starts no pod with devices",
        Level.ERROR,
    )
    KATA_ASKS_NO_KUBELET = _host(
        "KataAsksNoKubelet", "a Kata runtime plugs devices before its VM starts, without asking the kubelet for them"
    )
    KATA_SETTINGS_INVALID = _host(
        "KataSettingsInvalid",
        "a Kata runtime refuses its `cold_plug_vfio`, `hot_plug_vfio`, `pcie_root_port` or `vfio_mode` and starts"
        " no pod (error), or no runtime plugs devices",
        Level.ERROR,
    )
    KATA_HAS_NO_HANDLER = _host(
        "KataHasNoHandler", "Kata is installed, and no handler of the container runtime starts it, so no pod can use it"
    )
    KATA_PLUGS_NO_MDEV = _host(
        "KataPlugsNoMdev", "a Kata runtime can't give mediated devices to its VM, and the node has some"
    )
    KATA_GETS_TWO_NODES = _host(
        "KataGetsTwoNodes",
        "containers get two device nodes for each device (`vfio_nodes: both`), and a Kata runtime plugs both, so"
        " that none of its pods with devices starts",
    )
    CDI_FOLDER_NOT_READ = _host("CdiFolderNotRead", "the container runtime does not read `/run/cdi`", Level.ERROR)

    NOT_PERMITTED = _host("NotPermitted", "KubeVirt does not permit a resource of this node", Level.ERROR)
    PERMITTED_NAME_UNKNOWN = _host(
        "PermittedNameUnknown", "KubeVirt permits a name that is similar to a resource of this node"
    )
    SELECTOR_MISMATCH = _host(
        "SelectorMismatch", "KubeVirt permits a resource with a selector that does not match the resource's devices"
    )
    NOT_EXTERNAL = _host(
        "NotExternal", "KubeVirt offers a resource itself (no `externalResourceProvider: true`)", Level.ERROR
    )
    MDEVS_NOT_OURS = _host("MdevsNotOurs", "KubeVirt deletes mediated devices that it did not create", Level.ERROR)
    FEATURE_GATE_MISSING = _host("FeatureGateMissing", "KubeVirt lacks a feature gate that a device needs", Level.ERROR)
    IOMMUFD_MISSING = _host(
        "IommufdMissing", "KubeVirt's gate IOMMUFD is on, so that a node without `/dev/iommu` runs no VM", Level.ERROR
    )

    NOT_READ = _host("NotRead", "a file or setting could not be read", Level.UNKNOWN)

    NO_SUCH_OBJECT = _workload("NoSuchObject", "the namespace has no such VM, VMI or pod")
    KUBEVIRT_NOT_INSTALLED = _workload("KubeVirtNotInstalled", "the API server has no kind VirtualMachine")
    NO_DEVICE_REQUESTED = _workload("NoDeviceRequested", "the VM or pod requests no GPU and no other device")
    RESTART_REQUIRED = _workload("RestartRequired", "the VM requests other devices than when it was started")
    VM_STOPPED = _workload("VmStopped", "the VM is not started: `runStrategy`, `running`")
    VM_NOT_STARTED = _workload("VmNotStarted", "KubeVirt has not created the VMI of the VM yet, or failed to")
    POD_NOT_RUNNING = _workload("PodNotRunning", "the pod or its guest does not run, or has ended")
    UNSCHEDULABLE = _workload("Unschedulable", "another cause that the scheduler reports: memory, processors, gates")
    ADMISSION_REFUSED = _workload(
        "AdmissionRefused",
        "the node's kubelet refused the pod. If gpuvirt's plugin refused, the code is that of the device's reason",
    )
    TOO_FEW_DEVICES = _workload("TooFewDevices", "the node has fewer devices in total than are requested")
    ALL_ALLOCATED = _workload("AllAllocated", "other pods request the node's devices")
    NO_FREE_PIECE = _workload(
        "NoFreePiece",
        "no single shared GPU of the node has the requested units free",
    )
    TOO_COMPLEX = _workload(
        "TooComplex",
        "the pod has too many containers with units for a search of all arrangements, and the first does not fit",
    )
    NO_GPU_LARGE_ENOUGH = _workload(
        "NoGpuLargeEnough", "each shared GPU of the node has fewer units than are requested"
    )
    SHARES_NOT_ENFORCED = _workload(
        "SharesNotEnforced",
        "the pod requires an enforced share, but the node does not enforce shares",
    )
    INVALID_SHARE = _workload(
        "InvalidShare",
        "a container requests more units than a GPU has, but not whole GPUs",
    )
    NODE_NOT_READY = _workload("NodeNotReady", "the node is not ready")
    NODE_CORDONED = _workload("NodeCordoned", "the node is cordoned")
    WORKER_AWAY = _workload(
        "WorkerAway", "a VgpuSchedule has suspended the node's VM, drains the node, or is starting the VM"
    )
    OTHER_PHASE = _workload(
        "OtherPhase",
        "the node offers the resource only in another phase of a VgpuSchedule",
    )
    NODE_SELECTOR_MISMATCH = _workload("NodeSelectorMismatch", "the node lacks a label of the nodeSelector")
    TAINT_NOT_TOLERATED = _workload("TaintNotTolerated", "the node has a taint that the pod does not tolerate")
    NOT_COUNTED = _workload(
        "NotCounted", "the kubelet does not count devices as healthy that the agent reports as healthy"
    )
    NO_SUCH_RESOURCE = _workload("NoSuchResource", "no node, or not this node, offers the resource")
    NO_SUCH_DEVICE = _workload("NoSuchDevice", "the host has no such device")
    NOT_A_GPU = _workload("NotAGpu", "the device is not a GPU of NVIDIA, AMD or Intel")
