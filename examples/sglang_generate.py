"""Write on with SGLang and a model in a store, without a download of its weights.

    python examples/sglang_generate.py s3://models/llama-8b --tokens 1 15043 3186
    python examples/sglang_generate.py s3://models/llama-70b --tokens 1 15043 3186 --options '{"tp_size": 4}'
    python examples/sglang_generate.py s3://models/policy --tokens 1 --then s3://models/step-100 s3://models/step-200

Run it where SGLang and Longshore are installed. Config and tokenizer go to a local folder; each rank of SGLang reads
its part of the weights from the store. `--then` takes further revisions in place, of which only what changed is read.
"""

from __future__ import annotations

import argparse
import json
import os

import longshore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="URI of the model, or a folder that `longshore config-folder` has made")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1], help="ids of the prompt's tokens")
    parser.add_argument("--count", type=int, default=16, help="tokens to write")
    parser.add_argument("--then", nargs="+", default=[], help="URIs of further revisions, which the engine then takes")
    parser.add_argument("--options", type=json.loads, default={}, help="further arguments of sglang.Engine, as JSON")
    args = parser.parse_args()

    import sglang

    folder = args.model if os.path.isdir(args.model) else longshore.config_folder(args.model)
    engine = sglang.Engine(
        **{"model_path": folder, "load_format": "private", "skip_tokenizer_init": True, **args.options}
    )
    sampling = {"max_new_tokens": args.count, "temperature": 0, "ignore_eos": True}

    def write() -> None:
        (found,) = engine.generate(input_ids=[args.tokens], sampling_params=sampling)
        print("written:", *found["output_ids"])

    try:
        write()
        for uri in args.then:
            taken, message, _ = engine.update_weights_from_disk(uri)
            if not taken:
                raise SystemExit(message)
            write()
    finally:
        engine.shutdown()


if __name__ == "__main__":  # SGLang starts processes that import this file
    main()
