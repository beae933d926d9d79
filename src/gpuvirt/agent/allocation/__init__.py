"""Allocates devices when the kubelet admits a pod."""
