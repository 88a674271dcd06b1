"""Break the product on purpose, in one place at a time, and see whether its tests notice.

`operators.py` finds the changes that can be made. `runs.py` runs tests on a copied and broken tree. `rows.py` lists the
changes that a row of the fault matrix must notice.
"""
