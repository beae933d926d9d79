"""Answers to the kubelet when a pod is to have devices."""
