"""Every use of a private PyTorch interface, with its reason: one file for each part of PyTorch.

Tried on torch 2.13.0. When a new version of torch breaks something, it breaks here.
"""
