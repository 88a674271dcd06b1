"""Supply chain: the lock of every package, the list of all third-party parts (SBOM), and the gate of known defects.

`lock` resolves against plain PyPI, `parts` reads what is pinned and bundled, `sbom` writes sbom.cdx.json, and
`advisories` fails if a part has a known defect. Owns requirements.lock and the JSON files here. Does not own
constraints.txt, which has the wanted versions. No module of the product imports this package.
"""
