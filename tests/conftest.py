"""For every test: where there is no GPU, Triton interprets its kernels. To be said before anything imports it."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
