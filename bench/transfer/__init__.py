"""Transfers of KV blocks between two worker processes: what they save and disturb, and what harm does to them."""
