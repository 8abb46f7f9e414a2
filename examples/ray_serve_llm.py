"""Serve a model in a store with Ray Serve LLM, without a download of its weights.

    python examples/ray_serve_llm.py s3://models/llama-70b --name llama-70b --options '{"tensor_parallel_size": 4}'
    curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"model": "llama-70b", "prompt": "Ray is", "max_tokens": 16}'

vLLM and Longshore must be installed on each node. Ends with Ctrl-C.
"""

from __future__ import annotations

import argparse
import json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="URI of the model")
    parser.add_argument("--name", default="model", help="the model's name in requests")
    parser.add_argument("--options", type=json.loads, default={}, help="engine_kwargs, as JSON")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--cpus", type=int, help="use no GPU, in a local Ray cluster with so many logical CPUs")
    args = parser.parse_args()

    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    if args.cpus:
        ray.init("local", num_cpus=args.cpus, include_dashboard=False)
    config = LLMConfig(
        model_loading_config={"model_id": args.name, "model_source": args.model},
        engine_kwargs=args.options,
        callback_config={"callback_class": "engines.ray_serve.ConfigFolder"},
        deployment_config={"num_replicas": 1},
        **({"accelerator_config": {"kind": "cpu"}} if args.cpus else {}),
    )
    serve.start(http_options={"port": args.port})
    app = build_openai_app({"llm_configs": [config], "ingress_deployment_config": {"num_replicas": 1}})
    serve.run(app, route_prefix="/", blocking=True)


if __name__ == "__main__":
    main()
