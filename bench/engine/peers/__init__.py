"""Programs that run one system under test each: a common protocol, vLLM, OpenVINO GenAI and transformers.

They import nothing from Blockyard. Does not own starting them (../systems.py).
"""
