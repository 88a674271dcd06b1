"""Settings for all tests of the worker: one thread, because a second one slows such small models down."""

import torch

torch.set_num_threads(1)
