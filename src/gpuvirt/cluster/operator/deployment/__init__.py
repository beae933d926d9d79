"""The objects of operands: which are lacking or have drifted, and how their pods are rolled out."""
