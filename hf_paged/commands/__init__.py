"""What `python -m hf_paged` runs, and the real model and real prompts it runs on.

Nothing in the cache itself imports this package.
"""
