"""Tests of the jobs layer."""
