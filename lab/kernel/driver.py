"""The source of a driver called `nvidia`, made from the kernel's own sample of an mdev driver (mtty.c, 6.1).

It takes the functions that carry NVIDIA's identity and lets each carry mdevs, by the rules of NVIDIA's manager: types
of one size at a time. The result is under the sample's licence and stays in the cache.
"""

from lab.kernel.errors import LabError

TAKE_ROOM = """mdev_state->nr_ports = type->nr_ports;
	mdev_state->room = type->room;
	type->room->size = type->nr_ports;"""

REPLACED = (
    ('.name = "mtty",', '.name = "nvidia-vgpu-vfio",'),
    ('sysfs_name = "1"', 'sysfs_name = "222"'),
    ('sysfs_name = "2"', 'sysfs_name = "223"'),
    ("Single port serial", "GRID T4-1B"),
    ("Dual port serial", "GRID T4-2B"),
    # One room for all devices becomes a room of each GPU.
    ("static atomic_t mdev_avail_ports = ATOMIC_INIT(MAX_MTTYS);", ""),
    ("\tint nr_ports;", "\tint nr_ports;\n\tstruct gpu_room *room;"),
    (
        "atomic_add(mdev_state->nr_ports, &mdev_avail_ports)",
        "atomic_add(mdev_state->nr_ports, &mdev_state->room->free)",
    ),
    ("&mdev_avail_ports", "&type->room->free"),
    ("if (avail_ports < type->nr_ports)", "if (avail_ports < type->nr_ports || is_other_size(type))"),
    ("mdev_state->nr_ports = type->nr_ports;", TAKE_ROOM),
    (
        "return atomic_read(&type->room->free) / type->nr_ports;",
        "return is_other_size(type) ? 0 : atomic_read(&type->room->free) / type->nr_ports;",
    ),
    (
        ".get_available = mtty_get_available,",
        ".get_available = mtty_get_available,\n\t.show_description = show_description,",
    ),
)

CUT = (
    ("static struct mtty_dev {", "} mtty_dev;"),
    ("static const struct file_operations vd_fops", "};"),
)

ROOM = """
struct gpu_room { atomic_t free; int size; };
"""

HELPERS = """
static bool is_other_size(struct mtty_type *type)
{
	return atomic_read(&type->room->free) < MAX_MTTYS && type->room->size != type->nr_ports;
}
static ssize_t show_description(struct mdev_type *mtype, char *buf)
{
	struct mtty_type *type = container_of(mtype, struct mtty_type, type);

	return sprintf(buf, "framebuffer=%dB, max_instance=%d\\n", type->nr_ports, MAX_MTTYS / type->nr_ports);
}
"""

PCI_DRIVER = """
struct gpu {
	struct mdev_parent parent;
	struct gpu_room room;
	struct mtty_type types[2];	/* a type embeds a kobject: one of each for every parent */
	struct mdev_type *listed[2];
};
static int gpu_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct gpu *gpu = kzalloc(sizeof(*gpu), GFP_KERNEL);
	int i, ret;

	if (!gpu)
		return -ENOMEM;
	atomic_set(&gpu->room.free, MAX_MTTYS);
	for (i = 0; i < 2; i++) {
		gpu->types[i].nr_ports = mtty_types[i].nr_ports;
		gpu->types[i].room = &gpu->room;
		gpu->types[i].type.sysfs_name = mtty_types[i].type.sysfs_name;
		gpu->types[i].type.pretty_name = mtty_types[i].type.pretty_name;
		gpu->listed[i] = &gpu->types[i].type;
	}
	pci_set_drvdata(pdev, gpu);
	ret = mdev_register_parent(&gpu->parent, &pdev->dev, &mtty_driver, gpu->listed, 2);
	if (ret)
		kfree(gpu);
	return ret;
}
static void gpu_remove(struct pci_dev *pdev)
{
	struct gpu *gpu = pci_get_drvdata(pdev);

	mdev_unregister_parent(&gpu->parent);
	pci_disable_sriov(pdev);
	kfree(gpu);
}
static const struct pci_device_id gpu_ids[] = {
	{ 0x10de, PCI_ANY_ID, PCI_ANY_ID, PCI_ANY_ID, PCI_CLASS_DISPLAY_VGA << 8, 0xffff00, 0 },
	{ 0x10de, PCI_ANY_ID, PCI_ANY_ID, PCI_ANY_ID, PCI_CLASS_DISPLAY_3D << 8, 0xffff00, 0 },
	{ }
};
MODULE_DEVICE_TABLE(pci, gpu_ids);
static struct pci_driver gpu_driver = {
	.name = "nvidia", .id_table = gpu_ids, .probe = gpu_probe, .remove = gpu_remove,
	.sriov_configure = pci_sriov_configure_simple,
};
static int __init gpu_init(void)
{
	int ret = mdev_register_driver(&mtty_driver);

	if (ret)
		return ret;
	ret = pci_register_driver(&gpu_driver);
	if (ret)
		mdev_unregister_driver(&mtty_driver);
	return ret;
}
static void __exit gpu_exit(void)
{
	pci_unregister_driver(&gpu_driver);
	mdev_unregister_driver(&mtty_driver);
}
module_init(gpu_init)
module_exit(gpu_exit)

"""


def nvidia_source(sample: str) -> str:
    """Return the driver's source; raise LabError where the sample is not the one that this was written for."""
    text, _, rest = _split(sample, "static void mtty_device_release(struct device *dev)")
    licence = rest[rest.index("MODULE_LICENSE") :]
    for start, end in CUT:
        before, _, rest = _split(text, start)
        text = before + rest.partition(end)[2]
    for old, new in REPLACED:
        text = new.join(_pieces(text, old))
    before, state, rest = _split(text, "struct mdev_state {")
    types, _, rest = _split(rest, "static struct mdev_type *mtty_mdev_types[]")
    code = rest.partition("};")[2]
    return before + ROOM + state + types + HELPERS + code + PCI_DRIVER + licence


def _split(text: str, mark: str) -> tuple[str, str, str]:
    _pieces(text, mark)
    return text.partition(mark)


def _pieces(text: str, mark: str) -> list[str]:
    pieces = text.split(mark)
    if len(pieces) == 1:
        raise LabError(f"the kernel's sample mtty.c has no {mark!r}: it is of another series than 6.1")
    return pieces
