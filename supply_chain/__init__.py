"""What others made and we ship: the lock of every package, the list of all parts (SBOM), and the gate of known defects.

`lock` resolves against plain PyPI, `parts` reads what is pinned and bundled, `sbom` writes sbom.cdx.json, `advisories`
fails where a part has a known defect. Owns requirements.lock and the JSON files here. Does not own constraints.txt,
which says what versions are wanted. Nothing of the product imports this.
"""
