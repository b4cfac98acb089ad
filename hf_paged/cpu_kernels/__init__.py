"""Kernels for the CPU in C: `kernels.c`, and `library`, which compiles and loads it.

A kernel knows slots and block ids, and nothing of caches or models.
"""
