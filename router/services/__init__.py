"""gRPC services: turn messages into domain calls and back, and map errors to gRPC.

Does not own any logic behind them (../calls/, ../generation/).
"""
