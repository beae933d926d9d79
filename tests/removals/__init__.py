"""Removes the guards of the shipped code automatically, one at a time, and finds the test that notices.

A refusal could be lost without any test failing. Refused: mutmut and cosmic-ray, which change operators, numbers and
strings, and remove no `raise`, `yield` or `return`. One starts the whole test command for each mutant; the other's
trampolines change code objects, which the explorer sees. coverage.py would be a dependency for marks that the pass
makes itself. The cost: `killers.json` is a generated file in the repository, without which CI would run all tests.

Exploration must notice some removals by itself (`tests/explore/mutations.py`), several guards together: if two guards
prove the same, only their joint removal shows that it can detect the harm.
"""
