"""Router: takes requests over gRPC and OpenAI's HTTP, places each on a worker, and streams the answer back.

A request passes services/ or openai/, then calls/, admission/, request/, tokenizing/, dispatch/ with placement/ and
cluster/, and generation/. Never imports a worker. actor.py alone knows Ray.
"""
