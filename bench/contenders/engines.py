"""Engines that load a model: vLLM on the CPU and transformers, from the store through Longshore and otherwise.

    vllm_*           vLLM <-- `bench.contenders.vllm_costs`: what the loader of each worker took
    transformers_*   `from_pretrained` in this process

The clock of a load starts at the call that begins to fetch weights or config, and stops when every weight is in its
place. The start of vLLM's processes is not counted, as it is the same for all. Making the model without weights is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.contenders.buffers import set_runai_variables
from bench.contenders.ours import model_uri
from bench.contenders.ranks import REGION, download, set_s3_environment
from bench.harness.contender import Spec
from bench.harness.measure import measured, tree_cpu_s
from bench.harness.models import MODEL

VLLM_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
VLLM_OPTIONS = {"enforce_eager": True, "max_model_len": 64, "dtype": "bfloat16", "kv_cache_memory_bytes": 64 << 20}


def load_vllm(spec: Spec) -> None:
    """Start vLLM with the model. Options: "method", the ranks, and what the method has.

    longshore   the folder of `cluster.config_folder`, `load_format="longshore"`
    runai       the URI, `load_format="runai_streamer"`: vLLM's own integration
    download    one download to a local disk by obstore, then vLLM's own loader
    """
    with _folder_of_vllm(spec) as folder:
        os.environ["BENCH_LOADED_BYTES"] = str(spec.model_bytes // spec.options["ranks"])  # for `vllm_costs`
        import vllm

        with measured(spec, "cold", watch_memory=False) as m:
            begun_s, begun_cpu_s = time.monotonic(), tree_cpu_s()
            model, load_format = str(folder), "auto"
            if spec.options["method"] == "runai":
                model, load_format = model_uri(spec, MODEL), "runai_streamer"
            elif spec.options["method"] == "longshore":
                import cluster

                uri, load_format = model_uri(spec, MODEL), "longshore"
                model = cluster.config_folder(uri, folder / "config", endpoint_url=spec.endpoint, region=REGION)
            else:
                _download(spec, folder)
            wall_s, cpu_s = time.monotonic() - begun_s, tree_cpu_s() - begun_cpu_s
            llm = vllm.LLM(
                model=model,
                load_format=load_format,
                tensor_parallel_size=spec.options["ranks"],
                worker_extension_cls="bench.contenders.vllm_costs.LoadCosts",
                skip_tokenizer_init=True,
                **VLLM_OPTIONS,
            )
            m.stop()
            costs = llm.collective_rpc("load_costs")
            m.wall_s = wall_s + max(end_s for _, end_s, _, _ in costs) - min(start_s for start_s, _, _, _ in costs)
            m.cpu_s = cpu_s + sum(each for _, _, each, _ in costs)
            m.peak_bytes = sum(peak_bytes for _, _, _, peak_bytes in costs)


def update_vllm(spec: Spec) -> None:
    """Give a running vLLM two revisions in place, end it, and start another one with a further revision.

    Options: "ranks"; "revisions", four folders of the bucket. A start is the call of `vllm.LLM`, with the processes
    that it starts. It begins when the engine before has ended and vLLM is imported here.
    """
    with _folder_of_vllm(spec) as folder:
        import vllm

        import cluster
        from engines.vllm_updates import update

        first, few, other, last = spec.options["revisions"]

        def start(name: str) -> Any:
            model = cluster.config_folder(
                model_uri(spec, name), folder / name, endpoint_url=spec.endpoint, region=REGION
            )
            return vllm.LLM(
                model=model,
                load_format="longshore",
                weight_transfer_config={"backend": "longshore"},
                tensor_parallel_size=spec.options["ranks"],
                skip_tokenizer_init=True,
                **VLLM_OPTIONS,
            )

        llm = start(first)
        for case, name in (("update", few), ("everything", other)):
            with measured(spec, case, watch_memory=False):
                update(llm, model_uri(spec, name))
        llm.llm_engine.engine_core.shutdown()
        with measured(spec, "restart", watch_memory=False):
            llm = start(last)
        llm.llm_engine.engine_core.shutdown()


def load_transformers(spec: Spec) -> None:
    """Call `from_pretrained` and read a byte of each page of the weights. Options: "method", and what it has."""
    with _folder(spec) as folder:
        import torch
        import transformers

        from engines.transformers import from_pretrained

        with measured(spec, "cold") as m:
            if spec.options["method"] == "longshore":
                model = from_pretrained(model_uri(spec, MODEL), endpoint_url=spec.endpoint, region=REGION, dtype="auto")
            else:
                _download(spec, folder)
                model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
            with torch.no_grad():  # those of a file are mapped, and not read yet
                for weight in model.parameters():
                    weight.view(-1).view(torch.uint8)[::4096].sum()
            m.stop()


def _download(spec: Spec, folder: Path) -> None:
    download(spec, folder)
    for small in Path(spec.folder).glob("*.json"):
        shutil.copy(small, folder)


@contextlib.contextmanager
def _folder_of_vllm(spec: Spec) -> Iterator[Path]:
    """Make a folder as `_folder`, and give each rank of vLLM its share of the cores."""
    with _folder(spec) as folder:
        os.environ |= {**VLLM_VARIABLES, "XDG_RUNTIME_DIR": str(folder)}
        cores, ranks = sorted(os.sched_getaffinity(0)), int(spec.options["ranks"])
        parts = [",".join(map(str, cores[rank::ranks])) for rank in range(ranks)]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(parts)
        yield folder


@contextlib.contextmanager
def _folder(spec: Spec) -> Iterator[Path]:
    """Make a folder on the disk where the repository is, and set the variables of S3 clients."""
    set_s3_environment(spec)
    set_runai_variables({"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": 0, **spec.options})
    with tempfile.TemporaryDirectory(prefix="longshore-engine-") as name:
        yield Path(name)
