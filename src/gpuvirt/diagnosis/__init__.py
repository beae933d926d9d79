"""Diagnosis: the findings of `gpuvirt doctor`, and the explanations of `gpuvirt why`."""
