"""Durable arrays of a capture run, and back. Needs no torch, no GPU."""
