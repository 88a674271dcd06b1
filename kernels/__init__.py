"""Tensors in, tensors out: paged attention, KV writes, norms, rotary embedding and block copies.

Each operation has a plain reference (`reference`), a Triton kernel (`attention`, `cache_ops`, `elementwise`)
with a host wrapper (`triton_backend`), and a PyTorch path that is itself fast on a CPU (`torch_backend`).
`backend.choose_backend` is the one place that picks. Nothing here knows a request, a scheduler or a cluster.
"""
