"""LoRA adapters: their folders in PEFT's format, the choice of slots, and the memory of a device that holds weights.

slots.py and book.py are pure. Does not own how a layer adds an adapter (../model/, kernels/).
"""
