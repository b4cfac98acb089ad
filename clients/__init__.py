"""Libraries that call `generate()`, unmodified, on patched models: equal to unpatched, or not. `make clients` runs them."""
