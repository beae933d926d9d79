"""Tests of the admission of Kata's pods: decisions, reviews, config, and the webhook's process."""
