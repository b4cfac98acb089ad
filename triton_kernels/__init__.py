"""Triton kernels over the block table, one kernel a file: the kernel, its launcher, nothing else.

Installed as `hf_paged.triton_kernels`. Importing this package imports no Triton: the files that hold kernels do.
"""
