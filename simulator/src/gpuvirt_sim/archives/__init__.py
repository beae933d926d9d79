"""Simulated hosts from the archives of real ones, and back."""
