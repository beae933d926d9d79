"""Tests of the webhook's certificate: how it is issued, renewed without a gap, and written."""
