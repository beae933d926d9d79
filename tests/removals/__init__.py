"""Removes the guards of the shipped code automatically, one at a time, and finds the test that notices."""
