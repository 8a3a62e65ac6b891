"""Prompts to tensors: the engine, the rank-side capture, and attention semantics."""
