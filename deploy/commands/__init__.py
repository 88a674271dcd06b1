"""The commands of `blockyard`, by kind; cli.py gathers them.

Does not own what they do (../lifecycle/, ../requests/) or how it looks (../views/).
"""
