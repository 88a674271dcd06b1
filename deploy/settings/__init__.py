"""Settings of the command line, the environment and the configuration file, and the cluster that they describe.

Does not own their use (../lifecycle/).
"""
