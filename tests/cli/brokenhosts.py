"""Simulated hosts with a fault, or set up for another use than VMs, for commands."""

FELL_OFF = "slots: [{at: '0000:65:00.0', board: MI300X, driver: vfio-pci, group: 41, fell_off_bus: true}]"
CONSOLE = """
boards:
  P5000: {functions: [{id: '10de:1bb0', class: '030000', native_driver: nouveau}]}
slots: [{at: '0000:65:00.0', board: P5000, driver: vfio-pci, group: 90}]
platform: {release: 5.14.21-150500.55.59-default, console: '0000:65:00.0'}
"""
GRACE = "slots: [{at: '0000:65:00.0', board: GH200, driver: vfio-pci, group: 9}]"
BESIDE_NIC = """
slots:
  - {at: '0000:65:00.0', board: A10, driver: vfio-pci, group: 12}
  - {at: '0000:66:00.0', board: network, group: 12}
"""
NOUVEAU = "slots: [{at: '0000:65:00.0', board: A10, driver: nouveau, group: 12}]"
DISPLAY = """
boards:
  A5000: {functions: [{id: '10de:2231', class: '030000', subsystem: '10de:147e', native_driver: nvidia}]}
slots: [{at: '0000:65:00.0', board: A5000, group: 28}]
platform: {modules: [nvidia, nvidia_vgpu_vfio, vfio, vfio_pci, vfio_iommu_type1, mdev, kvm, kvm_intel]}
"""
M60 = """
boards:
  M60: {functions: [{id: '10de:13f2', class: '030000', subsystem: '10de:115e', native_driver: nvidia}], vgpus: mdev}
slots:
  - {at: '0000:64:00.0', board: root-port, group: 72}
  - {at: '0000:65:00.0', board: M60, driver: none, group: 72, behind: '0000:64:00.0'}
"""
OLD_DRIVER = """
slots:
  - at: '0000:65:00.0'
    board: A10
    group: 40
    vfs: 32
    vgpu_types: [{id: 593, name: NVIDIA A10-4Q, size: 4G, most: 6}, {id: 596, name: NVIDIA A10-12Q, size: 12G, most: 2}]
"""
FLEX = """
boards:
  Flex140:
    functions: [{id: '8086:56c1', class: '038000', subsystem: '8086:4905', revision: '05', native_driver: i915}]
    total_vfs: 12
slots: [{at: '0000:43:00.0', board: Flex140, group: 30}, {at: '0000:46:00.0', board: Flex140, group: 31, vfs: 4}]
"""
FULL = """
iommufd: true
slots: [{at: '0000:25:00.0', board: L40S, group: 11, vfs: 32, vgpus: {NVIDIA L40S-24Q: 2}}]
"""
CONSOLE_ON_NVIDIA = """
boards:
  RTX: {functions: [{id: '10de:2204', class: '030000', native_driver: nvidia}]}
slots: [{at: '0000:65:00.0', board: RTX, group: 12}]
platform: {console: '0000:65:00.0'}
"""
BESIDE_NIC_ON_NVIDIA = BESIDE_NIC.replace("driver: vfio-pci, ", "")
GRACE_ON_NVIDIA = "slots: [{at: '0000:65:00.0', board: GH200, group: 9}]"
IN_BAD_SLOT = "slots: [{at: '10000:65:00.0', board: A10, driver: vfio-pci, group: 9}]"
NO_DRIVER = "slots: [{at: '0000:65:00.0', board: A10, driver: none, group: 12}]"
WITH_VFS = "slots: [{at: '0000:65:00.0', board: A10, group: 12, vfs: 32}]"
T4 = "slots: [{at: '0000:86:00.0', board: T4, group: 12}]"
