"""The commands that read and explain: devices, status, doctor, why, support."""
