"""What can go wrong in this lab."""


class LabError(Exception):
    """The lab can't be prepared, or its guest does not do what it must; the text is fit for a person."""
