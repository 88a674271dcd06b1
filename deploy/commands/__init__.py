"""The commands of `blockyard`: their options and arguments. cli.py gathers them.

Does not own what they do (../lifecycle/, ../requests/) or how results look (../views/).
"""
