"""The only files that touch private parts of nnsight and vLLM; one file each.

`contract.py` names every part relied on, and its test says what changed when another version
breaks it.
"""
