"""LoRA adapters: their folders in PEFT's format, and the memory of a device that holds their weights.

Does not own which adapter is in which slot (../cache/) or how a layer adds it (../model/, kernels/).
"""
