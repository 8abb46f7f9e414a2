"""Print the norm of each tensor of a model in a store, in little memory.

    python examples/read_tensors.py s3://models/llama-8b

Tensors are read in the order of the files, so the next chunks are fetched while the norm is computed. Each chunk is
verified before a byte of it is used.
"""

from __future__ import annotations

import argparse

from longshore import safe_open


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="URI of the model, or a folder or file with it")
    args = parser.parse_args()

    with safe_open(args.model, framework="pt") as f:
        for name in f.offset_keys():
            tensor = f.get_tensor(name)
            print(f"{name} {list(tensor.shape)} {tensor.float().norm():.4g}")
        report = f.report()
    print(f"read {report['store_bytes']} bytes from the store, {report['cached_bytes']} from shared memory")


if __name__ == "__main__":
    main()
