"""Admission of Kata pods that request vGPUs: the additions and refusals of the mutating webhook."""
