"""The text of `longshore VERB --help` beside the options: a page per verb. And the completion script for shells."""

from __future__ import annotations

import argparse
import importlib
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.command_line.answers import EXIT_CODES, FAILED, INTERRUPTED, OK, TERMINATED, USAGE, print_json, write
from cluster.errors import PackageMissing
from storage.problems import install_hint


@dataclass(frozen=True, slots=True)
class Page:
    """The help of one verb."""

    summary: str  # in the list of verbs
    description: tuple[str, ...]  # paragraphs
    examples: tuple[str, ...]  # command lines that work as they are; a line of comment each comes before with "# "
    exit_codes: tuple[int, ...]  # those that the verb may end with, beside 0, 1, 2, 130 and 143
    target: str = ""  # what the verb's first argument is
    meanings: dict[int, str] = field(default_factory=dict)  # of codes that mean something of their own here


URI = "s3://bucket/prefix, another scheme's, or a local folder; or one safetensors file there"
LOAD = "id of a load or model, as `longshore status` shows it; or as much of its beginning as no other has"

PAGES = {
    "load": Page(
        "load a model into the cluster and keep it there",
        (
            "Streams the checkpoint at URI into the workers of a Ray cluster: one worker per rank, each with exactly "
            "its slices, every chunk checked against the digest that `longshore publish` wrote. The model stays "
            "resident when the command ends; a second load of the same model with the same options gets it at once.",
            "Joins the cluster that --address or RAY_ADDRESS names, else one that runs on this machine, else starts a "
            "local one, which ends with the command. What does not fit is refused before a byte moves. Progress goes "
            "to stderr, the report to stdout.",
        ),
        (
            "longshore load s3://models/llama-70b --tp 8",
            "longshore load s3://models/llama-70b --tp 4 --fit auto --wait-for-resources 600",
            "longshore load /data/llama-8b --device cpu --no-keep --json",
            "# as a job, from outside the cluster:",
            "ray job submit --address http://head:8265 -- longshore load s3://models/llama-70b --tp 8",
        ),
        (3, 4, 5, 6, 7),
        URI,
        {130: "interrupted with Ctrl-C; a load that was to stay goes on in the cluster"},
    ),
    "plan": Page(
        "show what would be loaded where; moves no bytes",
        (
            "Reads the manifest or the headers of the checkpoint, cuts it as `longshore load` with the same options "
            "would, and shows what each rank would hold, whether it fits, and how long it should take. Needs no "
            "cluster, no GPU and no torch; a config.json alone is enough for an estimate.",
        ),
        (
            "longshore plan s3://models/llama-70b --tp 8",
            "longshore plan llama-70b/config.json --tp 4 --memory 4x24GB --store-rate 40Gbit/s --picture plan.svg",
        ),
        (3, 5, 6, 7),
        URI,
        {3: "does not fit; no loadable checkpoint there, or it cannot be cut as asked"},
    ),
    "publish": Page(
        "write a manifest with a digest of every chunk",
        (
            "Reads every byte of the checkpoint at SOURCE, checks it against the store's own checksums (or reads it "
            "twice), and writes longshore.manifest.json beside it; with DEST it copies the checkpoint there first, and "
            "publishes the copy. A publish that was interrupted goes on where it was. It needs no cluster.",
        ),
        (
            "longshore publish s3://models/llama-70b",
            "longshore publish /data/llama-70b s3://models/llama-70b --sign-key signer",
        ),
        (3, 5, 6),
        "the checkpoint: a local folder or a URI",
    ),
    "convert": Page(
        "turn training checkpoints into a published model",
        (
            "Reads the checkpoint at SOURCE and writes it to DEST in safetensors, with a manifest. The format is "
            "recognised by its files: FSDP and verl ranks, torch DCP, DeepSpeed ZeRO, Megatron-Core, .bin and .pt "
            "state dicts, safetensors. No code in them is run. Memory does not grow with the model.",
            "What is wrong with the source is listed before a byte is written. A conversion that was interrupted goes "
            "on when the command is repeated. It needs no cluster; with --on-cluster the nodes of one do the work.",
        ),
        (
            "longshore convert /runs/7/checkpoint /models/run-7 --dry-run",
            "longshore convert s3://runs/7/global_step_80 s3://models/run-7 --dtype bfloat16 --workers 4",
            "ray job submit -- longshore convert s3://runs/7/global_step_80 s3://models/run-7 --on-cluster",
        ),
        (3, 5, 6, 7),
        "the checkpoint: a local folder, a file or a URI",
        {3: "not whole, of no known format, or with a pickle that names code; nothing was written"},
    ),
    "merge": Page(
        "the same as convert",
        (
            "Reads the checkpoint at SOURCE and writes it to DEST in safetensors, with a manifest. The format is "
            "recognised by its files: FSDP and verl ranks, torch DCP, DeepSpeed ZeRO, Megatron-Core, .bin and .pt "
            "state dicts, safetensors. No code in them is run. Memory does not grow with the model.",
            "What is wrong with the source is listed before a byte is written. A conversion that was interrupted goes "
            "on when the command is repeated. It is another name of `longshore convert`.",
        ),
        (
            "longshore merge /runs/7/checkpoint /models/run-7 --dry-run",
            "longshore merge s3://runs/7/global_step_80 s3://models/run-7 --dtype bfloat16 --workers 4",
        ),
        (3, 5, 6, 7),
        "the checkpoint: a local folder, a file or a URI",
        {3: "not whole, of no known format, or with a pickle that names code; nothing was written"},
    ),
    "verify": Page(
        "read a published model and check every digest",
        (
            "Reads everything that the manifest names, compares digests, sizes and tensors, and lists all that "
            "differs. It needs no cluster.",
        ),
        ("longshore verify s3://models/llama-70b", "longshore verify s3://models/llama-70b --trusted-key signer.pub"),
        (3, 5, 6),
        URI,
        {1: "the model was never published, so there is nothing to compare with"},
    ),
    "saves": Page(
        "list what interrupted saves left, and remove it",
        (
            "Lists open uploads, files and the journal of saves to URI that did not end. The next save of the same "
            "tensors continues from them, so clean only what nobody will continue. With --clean they are removed. "
            "Published files stay, and those of older saves that the history of saves names. If the manifest cannot be "
            "read, all files stay. It needs no cluster.",
            "A save that runs now looks like an interrupted one. --clean ends it with an error.",
        ),
        ("longshore saves s3://models/run-7", "longshore saves s3://models/run-7 --clean"),
        (5, 6),
        "the folder that `cluster.save` was given",
        {6: "the manifest cannot be read, so files stay"},
    ),
    "sign": Page(
        "sign the manifest of a published model",
        (
            "Writes longshore.manifest.sig beside the manifest, for this manifest under one name: "
            "loading another model in its place is an error. `longshore publish --sign-key` does both at once. The "
            "key is read from a file and never sent anywhere.",
        ),
        ("longshore sign s3://models/llama-70b --key signer",),
        (5, 6),
        URI,
    ),
    "config-folder": Page(
        "make a local folder with a model's config and tokenizer, for engines",
        (
            "Fetches config.json, the tokenizer and generation files, each verified against the manifest, and prints "
            "the folder's path. Weights stay in the store: the folder's longshore.json says where, and a loader of an "
            "engine reads them from there. .py files are fetched with --code only, because engines run them.",
        ),
        (
            "longshore config-folder s3://models/llama-8b",
            "longshore config-folder s3://models/llama-8b --folder ./llama-8b",
        ),
        (3, 5, 6),
        URI,
    ),
    "keygen": Page(
        "make a key to sign manifests with: FILE and FILE.pub",
        (
            "FILE is the private key, which only its owner can read: keep it where models are published. FILE.pub is "
            "for everybody who loads them (--trusted-key, LONGSHORE_TRUSTED_KEYS). No file is overwritten.",
        ),
        ("longshore keygen signer",),
        (),
        "where the private key goes",
    ),
    "status": Page(
        "show the cluster's models, nodes and saves",
        (
            "Shows loads and resident models, the nodes that hold chunks of them, and saves. It starts nothing: "
            "where no load has been yet, no coordinator runs, and that is an error; --watch waits for the first load.",
            "With --watch it goes on until Ctrl-C. On a terminal it draws bars, rates, ranks by node, nodes and the "
            "last events; elsewhere it prints a line for each change; with --json a document per look, one per line. "
            "A coordinator that is killed is waited for; when the cluster is lost the command says so and ends with 7.",
        ),
        ("longshore status", "longshore status --watch", "longshore status --watch 5 --json"),
        (7,),
        "",
        {130: "ended with Ctrl-C, as --watch always is"},
    ),
    "events": Page(
        "show what happened to a load or a save, or follow it",
        (
            "Lists the events of a load, save or conversion by its id, oldest first, with numbers that --after goes on "
            "from: changes of its state, ranks that were ready, lost, replaced or moved, and what it waited for. The "
            "last 1000 of a load are kept, until five minutes after its end.",
            "With --follow it goes on until the load has failed or was released, or the save has ended, with --until "
            "ready until it is ready, or can be no more. --json prints one document; with --follow one per line, and "
            "a last line of kind `end`.",
        ),
        (
            "longshore events llama-70b-3f9a21c4",
            "longshore events llama-70b --until ready",
            "longshore events llama-70b-3f9a21c4 --after 17 --json",
        ),
        (7,),
        LOAD,
        {1: "with --follow or --until: the load failed, or was released before it was ready"},
    ),
    "logs": Page(
        "show what the cluster's processes logged",
        (
            "Reads the logs of coordinator, node agents and workers on every node that lives, by a small Ray task "
            "there: no dashboard is needed, and no coordinator that still runs. With LOAD: the lines of its workers, "
            "and those of the others that are about it. Lines are in the order of their times, and have neither "
            "passwords nor tokens.",
            "Of each process the last megabyte is read. What was on a node that is gone went with it. --json prints "
            "one document; with --follow one per line.",
        ),
        (
            "longshore logs --tail 100",
            "longshore logs llama-70b-3f9a21c4 --rank 3 --follow",
            "longshore logs --node 10.0.0.7 --json",
        ),
        (7,),
    ),
    "update": Page(
        "give a resident model the contents of another revision, in place",
        (
            "Compares the manifests, reads only the chunks that differ, and gives the tensors of every rank their new "
            "contents: all ranks, or none. What changed is staged in host memory beside the model first; --streaming "
            "needs no such memory, but a failure in its middle breaks the model until it is updated again.",
        ),
        (
            "longshore update llama-70b-3f9a21c4",
            "longshore update llama-70b-3f9a21c4 s3://models/llama-70b/step-2000",
        ),
        (3, 4, 5, 6, 7),
        LOAD,
    ),
    "scale": Page(
        "give a resident model another number of replicas",
        (
            "Adds replicas at the end of the ranks, filled from what the model's nodes have, or removes the last ones "
            "when the calls that they run have ended. All other ranks serve meanwhile. When a further replica cannot "
            "be filled, the model stays as it was.",
        ),
        ("longshore scale llama-70b-3f9a21c4 2",),
        (3, 4, 5, 6, 7),
        LOAD,
    ),
    "release": Page(
        "free resident models",
        (
            "Takes the `keep` flag from a model: its memory is free as soon as no process holds it, and with --force "
            "at once. It says which models were freed, and how many processes still hold the others. With --all it "
            "goes on after a model that cannot be freed.",
            "--shutdown ends coordinator, agents and caches too, whatever their version; the Ray cluster stays.",
        ),
        (
            "longshore release llama-70b-3f9a21c4",
            "longshore release --all --force",
            "longshore release --shutdown",
        ),
        (7,),
        meanings={1: "with --all: a model could not be freed"},
    ),
    "demo": Page(
        "load a 1 GB model from a local S3 server into 4 CPU ranks",
        (
            "Writes a checkpoint, starts an S3 server and a Ray cluster on this machine, publishes and loads the "
            "model, compares every slice with what the safetensors library reads, and loads it again from the cache. "
            "It leaves no process and no file behind. It takes about 4 GB of memory and 2 GB of disk.",
            "With --write it does nothing but write such a checkpoint, for trying the other verbs without a model of "
            "one's own: as a Llama is named and shaped, with random values.",
        ),
        ("longshore demo", "longshore demo --size 200MB", "longshore demo --write models/small --size 200MB"),
        (4, 5, 6, 7),
    ),
    "serve": Page(
        "serve the HTTP API and the page, on Ray Serve, until ended",
        (
            "Puts the HTTP service on the cluster's Ray Serve: loads, plans, status, events, a page at / and an "
            "OpenAPI document at /openapi.json. It listens on this machine only, unless --host says otherwise, and "
            "then a token must be set in LONGSHORE_HTTP_TOKEN.",
        ),
        ("longshore serve", "longshore serve --host 0.0.0.0 --port 8000"),
        (7,),
        "",
        {130: "ended with Ctrl-C, as it always is"},
    ),
    "doctor": Page(
        "check this machine, the cluster and a store",
        (
            "Checks what an operator would: settings, packages, memory, /dev/shm, disk tier, GPU driver and torch of "
            "this machine; of every node of the cluster Longshore's, Python's, Ray's and torch's version, GPUs, CUDA "
            "driver, NCCL, /dev/shm and the clock; whether nodes reach each other at LONGSHORE_PEER_PORT; with a URI "
            "whether the store answers with these credentials, here and from every node. Each check says ok, warn, "
            "fail or skip, and what to do.",
            "It moves next to nothing, unless --bandwidth asks how fast bytes come.",
        ),
        (
            "longshore doctor",
            "longshore doctor s3://models/llama-70b",
            "longshore doctor s3://models/llama-70b --bandwidth --address head:6379",
        ),
        (),
        "",
        {1: "a check failed"},
    ),
    "completion": Page(
        "print a script that completes this command in a shell",
        (
            "The script completes verbs, options, their values and file names. It is the shell's own code: nothing of "
            "Longshore runs while you type. Print it again after an upgrade.",
        ),
        (
            "# bash, for this user, from the next shell on (with the package bash-completion):",
            "longshore completion bash > ~/.local/share/bash-completion/completions/longshore",
            "# zsh, in a folder of fpath; fish:",
            "longshore completion zsh > ~/.zfunc/_longshore",
            "longshore completion fish > ~/.config/fish/completions/longshore.fish",
        ),
        (7,),
        "",
        {7: f"the package shtab is not installed: {install_hint('completion')}"},
    ),
}


COLUMNS = 78
_ALWAYS = (OK, FAILED, USAGE, INTERRUPTED, TERMINATED)
_MEANINGS = {row.code: row.meaning for row in EXIT_CODES}


def description_of(page: Page) -> str:
    """Paragraphs, filled."""
    return "\n\n".join(textwrap.fill(paragraph, COLUMNS) for paragraph in page.description)


def epilog_of(page: Page) -> str:
    """Examples, then the exit codes that the verb has."""
    codes = sorted({*_ALWAYS, *page.exit_codes, *page.meanings})
    meanings = {INTERRUPTED: "interrupted with Ctrl-C", **page.meanings}
    return f"examples:\n{_examples(page.examples)}\n\n{exit_codes_text(codes, meanings)}"


def exit_codes_text(codes: Iterable[int] = tuple(_MEANINGS), meanings: Mapping[int, str] | None = None) -> str:
    """A table; `meanings` come before the general ones."""
    meant = {**_MEANINGS, **(meanings or {})}
    rows = (
        textwrap.fill(meant[code], COLUMNS, initial_indent=f"  {code:>3}  ", subsequent_indent=" " * 7)
        for code in codes
    )
    return "exit codes:\n" + "\n".join(rows)


def _examples(lines: Iterable[str]) -> str:
    """Lines that are too long go on after a backslash, as a shell takes them."""
    return "\n".join(_broken(line) for line in lines)


def _broken(line: str) -> str:
    parts = textwrap.wrap(line, COLUMNS - 8, break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(f"{'      ' if at else '  '}{part}" for at, part in enumerate(parts))


SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "FILE.svg", "URI", "SOURCE", "DEST")  # names of values that may be a path here
_FOLDERS = ("FOLDER",)


def run_completion(args: argparse.Namespace) -> int:
    """Print the script. Raises PackageMissing."""
    script = completion_script(args.parser, args.shell)
    if args.json:
        print_json({"shell": args.shell, "script": script})
    else:
        write(script)
    return OK


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the shell script that completes the parser's command line. Raises PackageMissing without shtab.

    The parser's texts are not those of its help afterwards.
    """
    try:
        shtab: Any = importlib.import_module("shtab")
    except ImportError as error:
        raise PackageMissing(
            "the package that writes completions is not installed", hint=install_hint("completion"), package="shtab"
        ) from error
    for action in _actions(parser):
        if action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        if action.help:
            action.help = _plain(action.help)
    script: str = shtab.complete(parser, shell)
    return script if script.endswith("\n") else f"{script}\n"


def _plain(text: str) -> str:
    """Without what a shell might run or take for the end of a text: descriptions go into its code."""
    return text.translate(str.maketrans('"\n', "' ", "`$\\"))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Return the actions of the parser and of all its verbs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                verb = action.choices[listed.dest]
                verb.description = _plain(listed.help or "")  # what a shell shows beside the verb
                yield from _actions(verb)
        else:
            yield action
