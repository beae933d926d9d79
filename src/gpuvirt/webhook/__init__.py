"""Admission of Kata pods that request vGPUs, and of pods with units: the mutating webhook's additions and refusals."""
