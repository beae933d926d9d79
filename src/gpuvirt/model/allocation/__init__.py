"""The devices that are allocated to pods, and the attachments that containers get."""
