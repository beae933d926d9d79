"""Admission of pods that run in VMs of Kata and request vGPUs: what the mutating webhook adds, or refuses."""
