"""The errors of this lab."""


class LabError(Exception):
    """The lab can't be prepared, or its guest does not work; the text is a message for the user."""


class NotAvailableError(LabError):
    """Debian's archive, or what apt knows of it, lacks a package, or has packages that don't fit together."""


class NotBootedError(LabError):
    """A guest was not ready in time. Where QEMU was stopped in a boot, the guest may have lost its timer for good."""
