"""Models of transformers from a store, beside transformers' own `from_pretrained` of the same files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import cluster
from cluster.config import Config
from cluster.errors import ConfigError, LayoutError, ModelConfigError
from storage.errors import LongshoreError
from tests.support.counting_proxy import CountingProxy
from tests.support.hf_models import FAMILIES, SHARD_BYTES, make_tiny
from tests.support.ray_clusters import environment
from tests.support.reference_slices import stored_bytes
from tests.support.stored_models import publish_to

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_host")]

SETTINGS = Config(arena_bytes=24 << 20, slot_bytes=1 << 20, window_bytes=8 << 20)


def save(family: str, folder: Path, **changes: Any) -> Path:
    make_tiny(family, **changes).save_pretrained(folder, max_shard_size=SHARD_BYTES)
    return folder


def check_same(ours: Any, theirs: Any) -> None:
    """Compare all parameters and buffers bit for bit."""
    import torch

    mine, expected = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == expected.keys()
    for name, tensor in expected.items():
        found = mine[name]
        assert type(found) is type(tensor), name
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_is_bit_for_bit_that_of_transformers(tmp_path: Path, family: str) -> None:
    import transformers

    from engines.transformers import from_pretrained

    folder = save(family, tmp_path / family)
    ours = from_pretrained(folder, settings=SETTINGS)
    theirs = getattr(transformers, FAMILIES[family].model_class).from_pretrained(folder)
    assert type(ours) is type(theirs)
    check_same(ours, theirs)


def test_options_of_transformers_are_passed_on(tmp_path: Path) -> None:
    import torch
    import transformers

    from engines.transformers import from_pretrained

    folder = save("llama", tmp_path / "llama")
    cluster.publish(folder)
    options: dict[str, Any] = {"dtype": torch.float32, "device_map": {"": "cpu"}, "attn_implementation": "eager"}
    ours = from_pretrained(folder, transformers.AutoModelForCausalLM, settings=SETTINGS, **options)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    check_same(ours, theirs)
    assert ours.config._attn_implementation == "eager"
    assert Path(ours.name_or_path, "config.json").exists()
    with torch.no_grad():
        tokens = torch.tensor([[1, 5, 7]])
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
    model, info = from_pretrained(folder, settings=SETTINGS, output_loading_info=True)
    assert not info["missing_keys"]
    assert model.can_generate()


def test_the_language_part_of_a_model_of_text_and_images(tmp_path: Path) -> None:
    """An Auto class for language models takes its config out of the whole model's."""
    import transformers

    from engines.transformers import from_pretrained

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    linear = {f"linear_{part}_head_dim": 8 for part in ("key", "value")} | {"linear_num_key_heads": 2}
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, **heads, **linear}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(
        text_config={**text, "linear_num_value_heads": 4, "full_attention_interval": 2}, vision_config=vision
    )
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "qwen")
    ours = from_pretrained(tmp_path / "qwen", transformers.AutoModelForCausalLM, settings=SETTINGS)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "qwen")
    assert type(ours) is type(theirs) is transformers.Qwen3_5ForCausalLM
    check_same(ours, theirs)


def test_quantization_config_and_a_checkpoint_quantized_by_it(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    import transformers

    from engines.transformers import from_pretrained

    folder = save("llama", tmp_path / "llama", hidden_size=64, intermediate_size=128)
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config)
    check_same(from_pretrained(folder, settings=SETTINGS, quantization_config=config), theirs)
    theirs.save_pretrained(tmp_path / "nf4")
    ours = from_pretrained(tmp_path / "nf4", settings=SETTINGS)
    check_same(ours, transformers.LlamaForCausalLM.from_pretrained(tmp_path / "nf4"))
    assert type(ours.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"


def test_fields_of_the_config_are_options(tmp_path: Path) -> None:
    import transformers

    from engines.transformers import from_pretrained

    folder = save("llama", tmp_path / "llama")
    kind = transformers.AutoModelForSequenceClassification
    ours = from_pretrained(folder, kind, settings=SETTINGS, num_labels=3, dtype="auto")
    assert ours.score.weight.shape[0] == 3
    assert len(ours.config.id2label) == 3


def test_generation_settings_are_those_of_transformers(tmp_path: Path) -> None:
    """From their own file, from an old config.json, or given."""
    import transformers

    from engines.transformers import from_pretrained

    folder = save("llama", tmp_path / "llama")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_beams": 3, "length_penalty": 0.5}))
    own = json.loads((folder / "generation_config.json").read_text())
    for said in ({**own, "temperature": 0.25, "do_sample": True}, None):
        if said is None:
            (folder / "generation_config.json").unlink()
        else:
            (folder / "generation_config.json").write_text(json.dumps(said))
        ours, theirs = from_pretrained(folder, settings=SETTINGS), transformers.LlamaForCausalLM.from_pretrained(folder)
        assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert ours.generation_config.num_beams == 3
    given = transformers.GenerationConfig(max_new_tokens=7)
    ours = from_pretrained(folder, settings=SETTINGS, generation_config=given)
    assert ours.generation_config.max_new_tokens == 7
    assert ours.generation_config.num_beams != 3


def test_weights_that_do_not_match_the_config_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import transformers

    from engines.transformers import from_pretrained

    folder = save("llama", tmp_path / "llama")
    config = transformers.AutoConfig.from_pretrained(folder)
    config.intermediate_size = 48
    transformers.utils.logging.enable_propagation()
    try:
        with pytest.raises(RuntimeError, match="mismatched"):
            from_pretrained(folder, settings=SETTINGS, config=config)
    finally:
        transformers.utils.logging.disable_propagation()
    assert "mlp" in caplog.text  # the report of transformers


def test_parameters_without_weights_are_named(tmp_path: Path) -> None:
    import transformers

    from engines.transformers import from_pretrained

    folder = save("llama", tmp_path / "llama")
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_hidden_layers += 1
    with pytest.raises(LayoutError, match=f"layers.{config.num_hidden_layers - 1}."):
        from_pretrained(folder, settings=SETTINGS, config=config)
    new_head = from_pretrained(folder, transformers.AutoModelForSequenceClassification, settings=SETTINGS)
    assert new_head.score.weight.shape[0] == 2  # is yet to be trained


def test_typed_errors(tmp_path: Path) -> None:
    from engines.transformers import from_pretrained

    folder = save("llama", tmp_path / "llama")
    with pytest.raises(ConfigError, match="subfolder"):
        from_pretrained(folder, subfolder="text_encoder")
    path = folder / "config.json"
    config = path.read_text()
    path.write_text(config.replace("LlamaForCausalLM", "NoSuchModel"))
    with pytest.raises(ConfigError, match="NoSuchModel"):
        from_pretrained(folder, settings=SETTINGS)
    path.unlink()
    with pytest.raises(ModelConfigError, match="config"):
        from_pretrained(folder, settings=SETTINGS)
    path.write_text(config)
    cluster.publish(folder)
    shard = next(iter(sorted(folder.glob("*.safetensors"))))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(LongshoreError):
        from_pretrained(folder, settings=SETTINGS)


PEAK = """
import json, os, sys
from cluster.config import Config
from engines.transformers import from_pretrained
from storage.host.memory import high_water_bytes, reset_high_water

settings = Config.model_validate(json.loads(os.environ["SETTINGS"]))
from_pretrained(sys.argv[1], settings=settings)  # so that imports and allocators have what they need
reset_high_water()
before_bytes = high_water_bytes()
model = from_pretrained(sys.argv[2], settings=settings)
print(high_water_bytes() - before_bytes, sum(value.nbytes for value in model.state_dict().values()))
"""


def test_memory_is_at_most_the_model_and_the_window(tmp_path: Path) -> None:
    small, large = save("llama", tmp_path / "small"), tmp_path / "large"
    settings = Config(arena_bytes=96 << 20, slot_bytes=4 << 20, chunk_bytes=4 << 20, window_bytes=32 << 20)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000}
    make_tiny("llama", **sizes).save_pretrained(large, max_shard_size="50MB")
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(small), str(large)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "SETTINGS": settings.model_dump_json(exclude_unset=True),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    peak_bytes, model_bytes = map(int, done.stdout.split()[-2:])
    assert model_bytes > 100 << 20
    assert peak_bytes < model_bytes + (32 << 20) + (32 << 20)  # the window, and all else


def test_hardly_a_chunk_is_fetched_twice_in_the_order_of_transformers(tmp_path: Path, monkeypatch: Any) -> None:
    """It sorts by name, while files have another order, and no layer fits in the window."""
    from actors.reader.open_model import OpenModel
    from engines.transformers import from_pretrained

    sizes = {"hidden_size": 1024, "intermediate_size": 6144, "vocab_size": 8000, "num_hidden_layers": 2}
    folder = save("llama", tmp_path / "llama", **sizes)
    fetched, close = [], OpenModel.close

    def report_and_close(opened: OpenModel) -> None:
        fetched.append(opened.report())
        close(opened)

    monkeypatch.setattr(OpenModel, "close", report_and_close)
    settings = Config(arena_bytes=32 << 20, window_bytes=32 << 20, slot_bytes=1 << 20, chunk_bytes=1 << 20)
    from_pretrained(folder, settings=settings)
    (report,) = fetched
    assert report["read_bytes"] > 2 * settings.window_bytes
    assert report["cached_bytes"] == 0
    # Nearly always none. A window that is full for a moment may cost some; without a plan it is 10 MB.
    assert report["refetched_bytes"] <= 5 * settings.chunk_bytes
    assert 0 <= report["store_bytes"] - report["refetched_bytes"] - report["read_bytes"] < 1 << 16  # the headers


RANK = """
import hashlib, json, os, sys
import torch, torch.distributed as dist
from transformers.distributed import DistributedConfig
from cluster.config import Config
from engines import transformers as engine
from engines.transformers import from_pretrained
opened, safe_open = [], engine.safe_open
engine.safe_open = lambda *given, **options: opened.append(safe_open(*given, **options)) or opened[-1]
settings = Config.model_validate(json.loads(os.environ["SETTINGS"]))
model = from_pretrained(
    os.environ["URI"], endpoint_url=os.environ["ENDPOINT"], region="us-east-1", settings=settings,
    distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"),
)
tokens = torch.tensor([[1, 5, 7]])
with torch.no_grad():
    logits = model(tokens).logits
logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
if dist.get_rank() == 0:
    torch.save(logits, os.environ["LOGITS"])
with open(f"{os.environ['LOGITS']}.{dist.get_rank()}", "w") as file:
    file.write(str(opened[0]._reader.delivered_bytes))
dist.barrier()
dist.destroy_process_group()
"""


def test_tensor_parallel_ranks_read_each_byte_once(tmp_path: Path, s3_server: Any) -> None:
    import torch
    import transformers

    folder = save("llama", tmp_path / "llama")
    model = publish_to(s3_server, folder, f"tp-{os.getpid()}")
    keys = s3_server.credentials()
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    with CountingProxy(s3_server.endpoint_url) as proxy:
        variables = {
            "AWS_ACCESS_KEY_ID": keys.access_key_id,
            "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
            "URI": model.uri,
            "ENDPOINT": proxy.endpoint_url,
            "SETTINGS": SETTINGS.model_copy(update={"group_patience_s": 60.0}).model_dump_json(exclude_unset=True),
            "LOGITS": str(tmp_path / "logits.pt"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        with environment(variables):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            done = subprocess.run([*command, str(tmp_path / "rank.py")], timeout=120, check=False, text=True)
        assert done.returncode == 0
        read = [(r.path, r.range) for r in proxy.requests() if r.path.endswith(".safetensors")]
    weights = [(path, span) for path, span in read if span is not None and span[1] - span[0] > 8]
    assert len(weights) == len(set(weights))
    sizes_bytes = {name: len(data) for name, (_, _, data) in stored_bytes(folder).items()}
    cut_bytes = sum(size for name, size in sizes_bytes.items() if "_proj" in name)
    for rank in range(2):  # each reads halves of what is cut
        rank_bytes = int(Path(f"{tmp_path / 'logits.pt'}.{rank}").read_text())
        assert cut_bytes / 2 < rank_bytes <= sum(sizes_bytes.values()) - cut_bytes / 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = theirs(torch.tensor([[1, 5, 7]])).logits
    assert torch.allclose(torch.load(tmp_path / "logits.pt"), expected, atol=2e-2)
