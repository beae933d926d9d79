"""The errors of this lab."""


class LabError(Exception):
    """The lab can't be prepared, or its guest does not work; the text is a message for the user."""
