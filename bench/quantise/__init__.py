"""Quantises checkpoints by rounding to the nearest, and measures what that costs in accuracy and gains in speed.

recipes.py packs each format. Tests read its checkpoints too. `python -m bench.quantise` measures accuracy and size,
`python -m bench.quantise.speed` the linear layers of decode steps, `python -m bench.quantise.peers` whole models beside
llama.cpp.
"""
