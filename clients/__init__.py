"""Libraries that call `generate()`, unmodified, on patched models: equal to unpatched, or not (docs/clients.md)."""
