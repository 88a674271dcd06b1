"""LoRA adapters: their folders in PEFT's format, and the slots of a device that hold their weights.

Does not own which adapter is in which slot (../scheduling/) or how a layer adds it (../model/, kernels/).
"""
