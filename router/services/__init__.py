"""The gRPC services: messages to domain calls and back, and the one mapping of errors to gRPC.

Does not own any logic behind them (../calls/, ../generation/).
"""
