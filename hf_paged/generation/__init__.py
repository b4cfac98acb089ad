"""One `generate()` call: which shortcuts it may take, and what its prefixes are found by.

- `soundness`: the gate. What every shortcut assumes, and whether it holds for this model and this call;
- `provenance`: where the code that a model runs was written;
- `identity`: everything that keys and values depend on besides the tokens: weights by content, attributes, settings;
- `salts`: namespaces that keep tenants apart.
"""
