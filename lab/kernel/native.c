// SPDX-License-Identifier: GPL-2.0-only
/*
 * A native driver that is not NVIDIA's. Each function has a character device below its own folder, which processes
 * read. The driver is unbound although the device is open, as those of graphics cards (drm_dev_unplug): reads then
 * fail with ENODEV, and the parameter `lost` counts the open files. It takes functions by `new_id` alone.
 */
#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>

#define MOST 16
#define CONTENT "here\n"

struct native {
	struct device dev;
	struct cdev cdev;
	struct mutex lock;
	bool gone;
	unsigned int open;
};

static unsigned int lost;
module_param(lost, uint, 0444);
MODULE_PARM_DESC(lost, "the files whose device was unbound while they were open");

static struct class native_class = { .name = KBUILD_MODNAME };
static dev_t first;
static DEFINE_IDA(minors);

static int native_open(struct inode *inode, struct file *file)
{
	struct native *native = container_of(inode->i_cdev, struct native, cdev);
	int ret = 0;

	mutex_lock(&native->lock);
	if (native->gone)
		ret = -ENODEV;
	else
		native->open++;
	mutex_unlock(&native->lock);
	file->private_data = native;
	return ret;
}

static int native_release(struct inode *inode, struct file *file)
{
	struct native *native = file->private_data;

	mutex_lock(&native->lock);
	native->open--;
	mutex_unlock(&native->lock);
	return 0;
}

static ssize_t native_read(struct file *file, char __user *to, size_t size, loff_t *at)
{
	struct native *native = file->private_data;
	loff_t start = 0;	/* each read returns the content */

	if (READ_ONCE(native->gone))
		return -ENODEV;
	return simple_read_from_buffer(to, size, &start, CONTENT, strlen(CONTENT));
}

static const struct file_operations native_fops = {
	.owner = THIS_MODULE, .open = native_open, .release = native_release, .read = native_read,
};

static void native_free(struct device *dev)
{
	ida_free(&minors, MINOR(dev->devt));
	kfree(container_of(dev, struct native, dev));
}

static int native_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct native *native;
	int ret, minor = ida_alloc_max(&minors, MOST - 1, GFP_KERNEL);

	if (minor < 0)
		return minor;
	native = kzalloc(sizeof(*native), GFP_KERNEL);
	if (!native) {
		ida_free(&minors, minor);
		return -ENOMEM;
	}
	mutex_init(&native->lock);
	device_initialize(&native->dev);
	native->dev.class = &native_class;
	native->dev.parent = &pdev->dev;
	native->dev.devt = MKDEV(MAJOR(first), minor);
	native->dev.release = native_free;
	cdev_init(&native->cdev, &native_fops);
	native->cdev.owner = THIS_MODULE;
	ret = dev_set_name(&native->dev, KBUILD_MODNAME "%d", minor);
	if (!ret)
		ret = cdev_device_add(&native->cdev, &native->dev);
	if (ret) {
		put_device(&native->dev);
		return ret;
	}
	pci_set_drvdata(pdev, native);
	return 0;
}

static void native_remove(struct pci_dev *pdev)
{
	struct native *native = pci_get_drvdata(pdev);

	mutex_lock(&native->lock);
	WRITE_ONCE(native->gone, true);
	lost += native->open;
	mutex_unlock(&native->lock);
	cdev_device_del(&native->cdev, &native->dev);
	put_device(&native->dev);
}

static struct pci_driver native_driver = {	/* like pci-stub's, with dynamic ids alone */
	.name = KBUILD_MODNAME, .probe = native_probe, .remove = native_remove,
};

static int __init native_init(void)
{
	int ret = alloc_chrdev_region(&first, 0, MOST, KBUILD_MODNAME);

	if (ret)
		return ret;
	ret = class_register(&native_class);
	if (ret)
		goto no_class;
	ret = pci_register_driver(&native_driver);
	if (!ret)
		return 0;
	class_unregister(&native_class);
no_class:
	unregister_chrdev_region(first, MOST);
	return ret;
}

static void __exit native_exit(void)
{
	pci_unregister_driver(&native_driver);
	class_unregister(&native_class);
	unregister_chrdev_region(first, MOST);
	ida_destroy(&minors);
}

module_init(native_init);
module_exit(native_exit);

MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("A native driver with a device node, for tests of gpuvirt");
