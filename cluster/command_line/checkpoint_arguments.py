"""The verbs about one checkpoint and their options: load, plan, publish, verify, sign, keygen."""

from __future__ import annotations

import argparse

from cluster.command_line import checkpoint_commands as commands
from cluster.command_line.arguments import (
    Verbs,
    add_address,
    add_signed_name,
    add_store,
    add_trusted,
    add_verb,
    count,
    seconds_of,
    size_of,
)
from cluster.command_line.device_map_arguments import add_device_map
from cluster.command_line.fit_arguments import add_fit, add_fit_ahead

# Those of `cluster.precision.recipes` and `cluster.request`, which import numpy and more; a test compares them.
DTYPES = ("auto", "bfloat16", "float16", "float32", "bf16", "fp16", "fp32")
SCHEMES = ("fp8", "fp8_tensor", "int8", "int4", "nf4")
PLACEMENTS = ("auto", "via_arena", "direct")


def add_checkpoint_verbs(verbs: Verbs) -> None:
    load = add_verb(verbs, "load", commands.run_load, "URI")
    _add_sizes(load)
    _add_precision(load)
    add_device_map(load)
    add_fit(load)
    load.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where the tensors go (auto: GPU if any)",
    )
    load.add_argument(
        "--keep",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="stay resident when this command has ended (default: yes)",
    )
    load.add_argument(
        "--wait-for-resources",
        type=seconds_of,
        default=0.0,
        metavar="SECONDS",
        help="wait that long for enough GPUs, for which an autoscaler may start nodes; 0 refuses at once (default)",
    )
    load.add_argument(
        "--placement",
        choices=PLACEMENTS,
        default="auto",
        help="chunks through the node's arena (cached), direct into a rank's host memory, or auto: direct when the "
        "arena is too small to keep them (default)",
    )
    add_trusted(load)
    load.add_argument("--timeout", type=seconds_of, metavar="SECONDS", help="give up after that long")
    add_address(load)
    add_store(load)

    plan = add_verb(verbs, "plan", commands.run_plan, "URI")
    _add_sizes(plan)
    _add_precision(plan)
    add_device_map(plan)
    add_fit_ahead(plan)
    add_trusted(plan)
    plan.add_argument(
        "--ranks-per-node", type=count, default=None, metavar="N", help="for the figures per node (default: all)"
    )
    plan.add_argument("--rank", type=int, metavar="N", help="show its part of every tensor too")
    add_store(plan)

    publish = add_verb(verbs, "publish", commands.run_publish, "SOURCE")
    publish.add_argument(
        "dest",
        nargs="?",
        metavar="DEST",
        help="copy the model there, publish the copy (default: in place)",
    )
    publish.add_argument(
        "--hash",
        choices=("blake3", "xxh3_128"),
        default="blake3",
        help="of the chunks (xxh3_128 is faster, finds accidents only, and cannot be signed)",
    )
    publish.add_argument(
        "--chunk-size", type=size_of, default=None, metavar="BYTES", help="1MiB to 16MiB (default: 8MiB)"
    )
    publish.add_argument("--force", action="store_true", help="replace a manifest that is there already")
    publish.add_argument(
        "--amax", action="store_true", help="record the largest value of each row: loads that quantize then read less"
    )
    publish.add_argument("--sign-key", metavar="FILE", help="sign the manifest with this private key")
    add_signed_name(publish, "name to sign it under")
    add_store(publish)

    verify = add_verb(verbs, "verify", commands.run_verify, "URI")
    add_trusted(verify)
    add_store(verify)

    sign = add_verb(verbs, "sign", commands.run_sign, "URI")
    sign.add_argument("--key", metavar="FILE", required=True, help="private key, as `longshore keygen` makes it")
    add_signed_name(sign, "name to sign it under")
    add_store(sign)

    add_verb(verbs, "keygen", commands.run_keygen, "FILE")


def _add_sizes(verb: argparse.ArgumentParser) -> None:
    for short, name, what in (
        ("--tp", "tensor_parallel_size", "ranks that share every layer"),
        ("--fsdp", "fsdp_size", "ranks that hold a part of dimension 0 of every tensor"),
        ("--dp", "data_parallel_size", "replicas"),
        ("--pp", "pipeline_parallel_size", "stages of consecutive layers"),
        ("--ep", "expert_parallel_size", "parts of the experts, spread over the ranks of --tp and --dp"),
        ("--vocabulary-multiple", "", "pad embedding and head with zeros to a multiple of this"),
    ):
        flags = [short, f"--{name.replace('_', '-')}"] if name else [short]
        dest = name or "vocabulary_multiple"
        verb.add_argument(*flags, dest=dest, type=count, default=1, metavar="N", help=what)
    verb.add_argument(
        "--etp",
        "--expert-tensor-parallel-size",
        dest="expert_tensor_parallel_size",
        type=count,
        default=0,
        metavar="N",
        help="ways in which each expert is cut (default: --tp divided by --ep)",
    )
    verb.add_argument(
        "--layout-rules",
        metavar="FILE",
        help='JSON of patterns of tensor names to rules, {"**.gate.weight": "replicate"}; before the family\'s own',
    )


def _add_precision(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="cast floating-point tensors on their way in (auto: as stored)"
    )
    verb.add_argument(
        "--quantization",
        choices=SCHEMES,
        help="quantize linear layers and experts on their way in (fp8, int8: a scale per row; int4: per 128 weights; "
        "nf4: bitsandbytes', per 64)",
    )
    verb.add_argument(
        "--skip-quantization",
        action="append",
        metavar="PATTERN",
        help="leave these tensors as they are; 'default' stands for embeddings, heads, routers and towers (may be "
        "given again; default: default)",
    )
