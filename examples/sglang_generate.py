"""Write on with SGLang, whose weights come straight from a store.

python examples/sglang_generate.py s3://models/llama-8b --tokens 1 15043 3186
python examples/sglang_generate.py s3://models/llama-70b --tokens 1 15043 3186 --options '{"tp_size": 4}'
"""

from __future__ import annotations

import argparse
import json

import sglang

import longshore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="URI of the model, or a folder with it")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1], help="ids of the prompt's tokens")
    parser.add_argument("--count", type=int, default=16, help="tokens to write")
    parser.add_argument("--options", type=json.loads, default={}, help="further arguments of sglang.Engine, as JSON")
    args = parser.parse_args()

    options = {"load_format": "private", **args.options}
    engine = sglang.Engine(model_path=longshore.config_folder(args.model), skip_tokenizer_init=True, **options)
    sampling = {"max_new_tokens": args.count, "temperature": 0, "ignore_eos": True}
    (answer,) = engine.generate(input_ids=[args.tokens], sampling_params=sampling)
    print("written:", *answer["output_ids"])
    engine.shutdown()


if __name__ == "__main__":  # SGLang starts processes that import this file
    main()
