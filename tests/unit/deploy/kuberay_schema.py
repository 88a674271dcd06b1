"""Strict JSON schemas of KubeRay's RayCluster (ray.io/v1) and the Prometheus operator's PodMonitor.

They hold the fields that the manifests use, because no package registry has the operators' own schemas. Any other field
is refused, so a misspelt one fails. Pod templates follow Kubernetes' own schema (`template`).
"""

from typing import Any

TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}


def strict(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": sorted(required),
        "additionalProperties": False,
    }


def texts(values: Any = TEXT) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


SECRET = strict({"secretKeyRef": strict({"name": TEXT, "key": TEXT})})
CREDENTIAL = {"oneOf": [strict({"value": TEXT}), strict({"valueFrom": SECRET})]}
TEMPLATE = {"type": "object"}
# Ray's options are texts, numbers too: KubeRay makes `--name=value` of them.
START_PARAMETERS = texts({"type": "string"})
METADATA = strict({"name": TEXT}, labels=texts())

RAY_CLUSTER = strict(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": METADATA,
        "spec": strict(
            {
                "headGroupSpec": strict({"rayStartParams": START_PARAMETERS, "template": TEMPLATE}),
                "workerGroupSpecs": {
                    "type": "array",
                    "items": strict(
                        {
                            "groupName": TEXT,
                            "minReplicas": COUNT,
                            "maxReplicas": COUNT,
                            "rayStartParams": START_PARAMETERS,
                            "template": TEMPLATE,
                        },
                        replicas=COUNT,
                    ),
                },
            },
            rayVersion=TEXT,
            gcsFaultToleranceOptions=strict(
                {"redisAddress": TEXT}, redisUsername=CREDENTIAL, redisPassword=CREDENTIAL
            ),
        ),
    }
)

POD_MONITOR = strict(
    {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PodMonitor"},
        "metadata": METADATA,
        "spec": strict(
            {
                "selector": strict({"matchLabels": texts()}),
                "podMetricsEndpoints": {
                    "type": "array",
                    "items": strict(
                        {"port": TEXT},
                        interval={"type": "string", "pattern": r"^\d+s$"},
                        metricRelabelings={
                            "type": "array",
                            "items": strict(
                                {"regex": TEXT},
                                action={"enum": ["keep", "drop", "replace", "labeldrop"]},
                                sourceLabels={"type": "array", "items": TEXT},
                                targetLabel=TEXT,
                            ),
                        },
                    ),
                },
            }
        ),
    }
)
