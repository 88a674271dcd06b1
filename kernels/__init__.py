"""Operations of one decoder step: paged attention, KV writes, norms, rotary embedding, linears and block copies.

Tensors in, tensors out. Most have a plain reference (torch/reference.py), a Triton kernel (triton/), C++ for CPUs
(cpu/) and a PyTorch path (torch/). Linears, block copies and the choice of tokens have some of these.
`selection.choose_backend` picks the backend. Nothing here knows a request, a scheduler or a cluster.
"""
