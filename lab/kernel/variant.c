// SPDX-License-Identifier: GPL-2.0-only
/*
 * A VFIO variant driver that gpuvirt has not in its list: it builds on vfio-pci-core, like those of NVIDIA, Intel and
 * others, and adds nothing. It binds to a function only by driver_override.
 */
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/vfio.h>
#include <linux/vfio_pci_core.h>

static int variant_open_device(struct vfio_device *device)
{
	struct vfio_pci_core_device *core = container_of(device, struct vfio_pci_core_device, vdev);
	int ret = vfio_pci_core_enable(core);

	if (ret)
		return ret;
	vfio_pci_core_finish_enable(core);
	return 0;
}

static const struct vfio_device_ops variant_ops = {
	.name = KBUILD_MODNAME,
	.init = vfio_pci_core_init_dev,
	.release = vfio_pci_core_release_dev,
	.open_device = variant_open_device,
	.close_device = vfio_pci_core_close_device,
	.ioctl = vfio_pci_core_ioctl,
	.device_feature = vfio_pci_core_ioctl_feature,
	.read = vfio_pci_core_read,
	.write = vfio_pci_core_write,
	.mmap = vfio_pci_core_mmap,
	.request = vfio_pci_core_request,
	.match = vfio_pci_core_match,
};

static int variant_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct vfio_pci_core_device *core = vfio_alloc_device(vfio_pci_core_device, vdev, &pdev->dev, &variant_ops);
	int ret;

	if (IS_ERR(core))
		return PTR_ERR(core);
	dev_set_drvdata(&pdev->dev, core);
	ret = vfio_pci_core_register_device(core);
	if (ret)
		vfio_put_device(&core->vdev);
	return ret;
}

static void variant_remove(struct pci_dev *pdev)
{
	struct vfio_pci_core_device *core = dev_get_drvdata(&pdev->dev);

	vfio_pci_core_unregister_device(core);
	vfio_put_device(&core->vdev);
}

static const struct pci_device_id variant_ids[] = {
	{ PCI_DRIVER_OVERRIDE_DEVICE_VFIO(PCI_ANY_ID, PCI_ANY_ID) },
	{ }
};
MODULE_DEVICE_TABLE(pci, variant_ids);

static struct pci_driver variant_driver = {
	.name = KBUILD_MODNAME,
	.id_table = variant_ids,
	.probe = variant_probe,
	.remove = variant_remove,
	.err_handler = &vfio_pci_core_err_handlers,
	.driver_managed_dma = true,
};
module_pci_driver(variant_driver);

MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("A VFIO variant driver for tests of gpuvirt");
