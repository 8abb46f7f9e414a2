"""What an update of a running engine does on one rank, with a torch module in the place of the engine's model."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import textwrap
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import cluster
from actors.reader.open_model import OpenModel
from cluster.errors import ClusterLost, DoesNotFit, ModelBroken, UpdateFailed, UpdateRefused
from cluster.small_files import ModelSource
from engines import resident_weights
from engines.filling import Weights, fill
from engines.resident_weights import (
    EngineUpdateReport,
    ResidentWeights,
    Update,
    changed_tensors,
    error_of,
    text_of,
    together,
)
from engines.written_weights import Watch
from tests.support.free_ports import free_ports

pytestmark = pytest.mark.slow

ROWS, COLUMNS = 512, 1024  # 1 MiB of float16: a chunk


class Packed(torch.nn.Module):
    """A layer whose weight is packed after it was filled, as linear layers of an engine for processors are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(ROWS, COLUMNS, dtype=torch.float16), requires_grad=False)
        self.packed: torch.Tensor | None = None

    def pack(self) -> None:
        self.packed = self.weight.data.clone().t().contiguous()
        self.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.float16), requires_grad=False)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(ROWS, COLUMNS, dtype=torch.float16)
        self.fused = torch.nn.Linear(COLUMNS, 2 * ROWS, bias=False, dtype=torch.float16)
        self.down = Packed()
        self.head = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float16)
        self.head.weight = self.embed.weight
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if name in ("gate", "up"):
                self.fused.weight.data.narrow(0, ROWS * (name == "up"), ROWS).copy_(tensor)
            else:
                getattr(self, name).weight.data.copy_(tensor)


NAMES = ("embed", "gate", "up", "down")
TENSOR_BYTES = ROWS * COLUMNS * 2


def tensors(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(ROWS, COLUMNS, generator=made).half() for name in NAMES}


def publish(folder: Path, contents: dict[str, torch.Tensor]) -> OpenModel:
    folder.mkdir()
    save_file(contents, folder / "model.safetensors")
    cluster.publish(folder, chunk_bytes=1 << 20)
    return cluster.safe_open(folder, cache=False)


@pytest.fixture
def old(tmp_path: Path) -> Iterator[OpenModel]:
    with publish(tmp_path / "old", tensors(0)) as opened:
        yield opened


@pytest.fixture
def net(old: OpenModel) -> Net:
    model = Net()
    fill_watched(model, old, model.load_weights)
    model.down.pack()
    return model


def fill_watched(model: Net, opened: OpenModel, load_weights: Any, names: Collection[str] = NAMES) -> None:
    """Fill a model as a loader of an engine does."""
    watch = Watch()
    some = ((name, tensor) for name, tensor in opened.lazy_tensors() if name in names)
    with watch:
        fill(model, watch.named(some), load_weights, lambda: "")
    ResidentWeights.attach(model, watch, ModelSource("old", "", {}), opened.index)


def update_to(net: Net, opened: OpenModel, *, streaming: bool = False) -> Update:
    return Update(
        ResidentWeights.of(net),
        opened,
        ModelSource("new", "", {"region": "there"}),
        net.load_weights,
        lambda module: module.pack(),
        streaming,  # type: ignore[operator, union-attr]
    )


def check(net: Net, contents: dict[str, torch.Tensor]) -> None:
    assert torch.equal(net.embed.weight, contents["embed"])
    assert net.head.weight is net.embed.weight
    assert torch.equal(net.fused.weight, torch.cat((contents["gate"], contents["up"])))
    assert net.down.packed is not None
    assert torch.equal(net.down.packed, contents["down"].t())
    assert not net.down.weight.numel()


@pytest.mark.parametrize("streaming", [False, True])
def test_changed_modules_are_replaced_in_place(net: Net, tmp_path: Path, streaming: bool) -> None:
    contents = {**tensors(0), **{name: tensors(1)[name] for name in ("up", "down")}}
    places = [net.embed.weight.data_ptr(), net.fused.weight.data_ptr()]
    with publish(tmp_path / "new", contents) as opened:
        update = update_to(net, opened, streaming=streaming)
        update.plan("here")
        update.prepare()
        check(net, tensors(0))
        assert update.changed == {"up", "down"}
        update.exchange()
        update.finish()
        assert opened.report()["read_bytes"] == 2 * TENSOR_BYTES  # gate, in the parameter of up, is copied
    check(net, contents)
    assert [net.embed.weight.data_ptr(), net.fused.weight.data_ptr()] == places


def first_all(model: Net) -> Any:
    """Return a loader that takes all weights before it writes the first."""
    return lambda weights: model.load_weights(list(weights))


def both_at_once(model: Net) -> Any:
    """Return a loader that keeps a part of a parameter until it has the other one, and then writes a copy of both."""

    def load_weights(weights: Weights) -> None:
        parts = {}
        for name, tensor in weights:
            if name in ("gate", "up"):
                parts[name] = tensor.float()
            else:
                model.load_weights([(name, tensor)])
            if len(parts) == 2:
                model.fused.weight.data.copy_(torch.cat((parts.pop("gate"), parts.pop("up"))))

    return load_weights


def adding(model: Net) -> Any:
    """Return a loader that adds to what is in a parameter, which it empties with the first part."""

    def load_weights(weights: Weights) -> None:
        for name, tensor in weights:
            if name == "gate":
                model.fused.weight.data.zero_()
            if name in ("gate", "up"):
                model.fused.weight.data.narrow(0, ROWS * (name == "up"), ROWS).add_(tensor)
            else:
                model.load_weights([(name, tensor)])

    return load_weights


def one_over_the_other(model: Net) -> Any:
    """Return a loader that writes a tensor where it writes another one later."""

    def load_weights(weights: Weights) -> None:
        for name, tensor in weights:
            if name == "gate":
                model.fused.weight.data.narrow(0, ROWS, ROWS).copy_(tensor)
            model.load_weights([(name, tensor)])

    return load_weights


@pytest.mark.parametrize(
    ("loader", "reads"),
    [(first_all, 1), (both_at_once, 2), (adding, 2), (one_over_the_other, 3)],  # the last one reads gate twice
)
@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_is_known_by_what_it_got(
    old: OpenModel, tmp_path: Path, loader: Any, reads: int, name: str
) -> None:
    """Tensors of a parameter are read together where one alone would leave other contents."""
    model = Net()
    fill_watched(model, old, loader(model))
    model.down.pack()
    contents = {**tensors(0), name: tensors(1)[name]}
    with publish(tmp_path / "new", contents) as opened:
        update = update_to(model, opened)
        update.load_weights = loader(model)
        update.plan("here")
        update.prepare()
        update.exchange()
        assert opened.report()["read_bytes"] == (reads if name in ("gate", "up") else 1) * TENSOR_BYTES
    check(model, contents)


def test_contents_of_unknown_origin_are_refused(old: OpenModel) -> None:
    """numpy's array does not say of which tensor it is, and the loader has taken all of them."""
    model = Net()

    def load_weights(weights: Weights) -> None:
        for name, tensor in list(weights):
            plain = torch.from_numpy(tensor.numpy()) if name == "down" else tensor
            model.load_weights([(name, plain)])

    fill_watched(model, old, load_weights)
    with pytest.raises(UpdateRefused, match=r"ways that are not known: 'down\.weight'"):
        ResidentWeights.of(model).check_updatable(old.index, lambda module: False)


def test_tied_weights_are_read_once_and_stay_tied(net: Net, tmp_path: Path) -> None:
    contents = {**tensors(0), "embed": tensors(1)["embed"]}
    with publish(tmp_path / "new", contents) as opened:
        update = update_to(net, opened)
        update.plan("here")
        update.prepare()
        update.exchange()
        assert opened.report()["read_bytes"] == TENSOR_BYTES
    check(net, contents)


def test_a_failed_read_leaves_the_old_weights(net: Net, tmp_path: Path) -> None:
    with publish(tmp_path / "new", tensors(2)) as opened:
        path = tmp_path / "new/model.safetensors"
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        update = update_to(net, opened)
        update.plan("here")
        with pytest.raises(cluster.LongshoreError):
            together(None, 1, update.prepare, exchanges=False)
    check(net, tensors(0))
    assert not ResidentWeights.of(net).broken


def test_a_failed_exchange_reads_everything_next_time(net: Net, tmp_path: Path) -> None:
    with publish(tmp_path / "new", {**tensors(0), "down": tensors(1)["down"]}) as opened:
        update = update_to(net, opened)
        update.plan("here")
        update.prepare()

        def fails(module: torch.nn.Module) -> None:
            raise RuntimeError("no kernel")

        update.repack = fails
        with pytest.raises(ModelBroken, match="no kernel") as caught:
            together(None, 1, update.exchange, exchanges=True)
        assert caught.value.details["updated_ranks"] == []
        again = update_to(net, opened)
        again.plan("here")
        again.prepare()
        again.exchange()
        again.finish()
        assert again.changed == set(NAMES)
    check(net, {**tensors(0), "down": tensors(1)["down"]})


@pytest.mark.parametrize("streaming", [False, True])
def test_too_little_room_is_an_error_before_a_byte_moves(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    monkeypatch.setattr(resident_weights, "HEADROOM_BYTES", 1 << 60)
    with publish(tmp_path / "new", tensors(1)) as opened:
        update = update_to(net, opened, streaming=streaming)
        with pytest.raises(DoesNotFit, match="Nothing was touched") as caught:
            take(update)
        assert ("streaming=True" in str(caught.value)) != streaming
        assert opened.report()["read_bytes"] == 0
    check(net, tensors(0))


def live_bytes() -> int:
    """Return the memory of all tensors of this process."""
    memory = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout == torch.strided:
            memory[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(memory.values())


@pytest.mark.parametrize(("streaming", "names"), [(False, ("down",)), (True, ("down",)), (False, NAMES), (True, NAMES)])
def test_an_update_takes_no_more_than_it_checks(
    net: Net, tmp_path: Path, streaming: bool, names: Collection[str]
) -> None:
    """An engine makes the new packed weights while the old ones and what was staged are there."""
    with publish(tmp_path / "new", {**tensors(0), **{name: tensors(1)[name] for name in names}}) as opened:
        update = update_to(net, opened, streaming=streaming)
        need_bytes, before_bytes = update.plan("here").host_bytes, live_bytes()
        most = [0]

        def repack(module: Any) -> None:
            packed = module.weight.data.clone().t().contiguous()
            most.append(live_bytes() - before_bytes)
            module.packed = packed
            module.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.float16), requires_grad=False)

        update.repack = repack
        update.prepare()
        update.exchange()
    assert need_bytes / 2 < max(most) <= need_bytes


def test_ranks_of_a_machine_need_room_together(net: Net, tmp_path: Path) -> None:
    with publish(tmp_path / "new", tensors(1)) as opened:
        vote = update_to(net, opened).plan("here")
    assert vote.host_bytes == 5 * TENSOR_BYTES  # of which one is packed a second time
    assert resident_weights.bytes_here([vote, vote, replace(vote, place="there")], "here") == 2 * vote.host_bytes


@pytest.mark.parametrize("streaming", [False, True])
def test_what_other_ranks_have_taken_is_not_needed_again(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    with publish(tmp_path / "new", tensors(1)) as opened:
        update = update_to(net, opened, streaming=streaming)
        own_bytes = update.plan("here").host_bytes
        update.host_bytes = 2 * own_bytes
        update.check_room()
        free_bytes = resident_weights.HEADROOM_BYTES + own_bytes  # the other rank was faster
        monkeypatch.setattr(resident_weights, "available_host_bytes", lambda: free_bytes)
        update.prepare()
        update.exchange()
    check(net, tensors(1))


@pytest.mark.parametrize("noticed", [True, False])
def test_weights_that_others_loaded_are_read_again(net: Net, old: OpenModel, tmp_path: Path, noticed: bool) -> None:
    """The engine loads its first weights again, by the model's loader or by one that says so."""
    with publish(tmp_path / "new", tensors(1)) as opened:
        report = take(update_to(net, opened))
        assert (report.revision, report.tensors, report.changed_tensors) == (opened.revision, 4, 4)
        assert report.staged_bytes == report.read_bytes == 4 * TENSOR_BYTES
        net.down.weight = torch.nn.Parameter(torch.empty(ROWS, COLUMNS, dtype=torch.float16), requires_grad=False)
        if noticed:
            net.load_weights(old.lazy_tensors())
        else:
            Net.load_weights(net, old.lazy_tensors())
            ResidentWeights.reloaded(net, ModelSource("again", "", {"region": "here"}))
            assert ResidentWeights.of(net).source.model_uri == "again"
        net.down.pack()
        check(net, tensors(0))
        take(update_to(net, opened))
        check(net, tensors(1))
        again = update_to(net, opened)
        take(again)
        assert again.changed == set[Any]()  # an update itself is not taken for such a load


def test_too_little_room_in_a_streaming_exchange(net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with publish(tmp_path / "new", tensors(1)) as opened:
        update = update_to(net, opened, streaming=True)
        room = iter([1 << 60, 1 << 60, 1 << 60, 1 << 60])  # for three looks before, and the first module
        monkeypatch.setattr(resident_weights, "available_host_bytes", lambda: next(room, 0))
        with pytest.raises(ModelBroken) as caught:
            take(update)
        assert "may have contents of both revisions" in str(caught.value)
        assert "Nothing was touched" not in str(caught.value)
        assert isinstance(caught.value.__cause__, DoesNotFit)
        assert "streaming" not in str(caught.value.__cause__)
    assert ResidentWeights.of(net).broken


def test_an_update_is_complete_though_its_report_is_lost(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost() -> Any:
        raise ClusterLost("the host of the arena has ended")

    with publish(tmp_path / "new", tensors(1)) as opened, caplog.at_level(logging.INFO):
        monkeypatch.setattr(opened, "report", lost)
        assert take(update_to(net, opened)).read_bytes == 0
        assert ResidentWeights.of(net).index is opened.index
        assert ResidentWeights.of(net).source == ModelSource("new", "", {"region": "there"})
    check(net, tensors(1))
    assert "the host of the arena has ended" in caplog.text


def take(update: Update) -> EngineUpdateReport:
    """Do all steps, as the only rank."""
    return resident_weights.take_together(lambda: nullcontext(update), None, 1, logging.getLogger("update"))


@pytest.mark.parametrize("down", [torch.zeros(ROWS, 2 * COLUMNS).half(), torch.zeros(ROWS, COLUMNS)])
def test_what_cannot_be_taken_is_refused(net: Net, tmp_path: Path, down: torch.Tensor) -> None:
    other = {**tensors(1), "down": down}
    with publish(tmp_path / "new", other) as opened:
        with pytest.raises(UpdateRefused, match="'down' differs in more than contents"):
            ResidentWeights.of(net).check_updatable(opened.index, lambda module: False)
        with pytest.raises(UpdateRefused, match="repacks the weights of Packed"):
            ResidentWeights.of(net).check_updatable(opened.index, lambda module: isinstance(module, Packed))
    with pytest.raises(UpdateRefused, match="not loaded by Longshore"):
        ResidentWeights.of(Net())


def test_parameters_that_nobody_filled_are_refused(old: OpenModel) -> None:
    model = Net()
    fill_watched(model, old, model.load_weights, ("embed", "gate", "up"))
    with pytest.raises(UpdateRefused, match="down\\.weight"):
        ResidentWeights.of(model).check_updatable(old.index, lambda module: False)


def test_an_engine_that_would_fill_live_weights_is_refused(net: Net, tmp_path: Path) -> None:
    """Some models of SGLang keep a list of their parameters between loads."""
    kept = dict(net.named_parameters())

    def load_weights(weights: Weights) -> None:
        for name, tensor in weights:
            kept[f"{name}.weight"].data.copy_(tensor)

    contents = {**tensors(0), "embed": tensors(1)["embed"]}
    with publish(tmp_path / "new", contents) as opened:
        update = update_to(net, opened)
        update.load_weights = load_weights
        update.plan("here")
        with pytest.raises(UpdateRefused, match="into weights that are in use"):
            update.prepare()
    check(net, tensors(0))


def test_contents_in_a_buffer_are_refused(old: OpenModel) -> None:
    model = Net()
    model.register_buffer("up", torch.empty(ROWS, COLUMNS, dtype=torch.float16))

    def load_weights(weights: Weights) -> None:
        for name, tensor in weights:
            if name == "up":
                model.up.copy_(tensor)
            model.load_weights([(name, tensor)])

    fill_watched(model, old, load_weights)
    with pytest.raises(UpdateRefused, match="ways that are not known: 'up'"):
        ResidentWeights.of(model).check_updatable(old.index, lambda module: False)


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (UpdateRefused("other shapes"), UpdateRefused),
        (DoesNotFit("no room", needed_bytes=1), DoesNotFit),
        (ModelBroken("rank 1 failed in the exchange: DoesNotFit: no room", updated_ranks=[0, 12]), ModelBroken),
        (ModelBroken("rank 0 failed in the exchange: KeyError: 'x'", updated_ranks=[]), ModelBroken),
        (UpdateFailed("rank 0 of 2 failed, so nothing was touched: UpdateRefused: other shapes"), UpdateRefused),
        (UpdateFailed("rank 0 of 2 failed, so nothing was touched: KeyError: 'x'"), UpdateFailed),
        (KeyError("x"), UpdateFailed),
    ],
)
def test_an_error_sent_as_a_text_keeps_its_type(sent: Exception, kind: type) -> None:
    found = error_of(f"Call to collective_rpc method failed: Worker failed with error '{text_of(sent)}', please check")
    assert type(found) is kind
    assert str(sent.args[0]) in str(found)
    if kind is ModelBroken:
        assert found.details == sent.details  # type: ignore[attr-defined]


def test_strides_of_a_parameter_stay(old: OpenModel, tmp_path: Path) -> None:
    """A parameter that is not contiguous is filled in place. One that the engine has rearranged is refused."""
    model = Net()
    model.down.weight = torch.nn.Parameter(torch.empty(COLUMNS, ROWS, dtype=torch.float16).t(), requires_grad=False)
    fill_watched(model, old, model.load_weights)
    kept = model.down.weight
    with publish(tmp_path / "new", tensors(1)) as opened:
        take(update_to(model, opened))
        assert model.down.weight is kept
        assert torch.equal(kept, tensors(1)["down"])
        assert kept.stride() == (1, ROWS)
        model.down.weight = torch.nn.Parameter(kept.contiguous(), requires_grad=False)
        with pytest.raises(UpdateRefused, match=r"changed the strides of 'down\.weight'"):
            ResidentWeights.of(model).check_updatable(opened.index, lambda module: False)


def copied(model: Net, tensor: torch.Tensor) -> Any:
    return torch.empty(ROWS, COLUMNS, dtype=torch.float16).copy_(tensor)


@pytest.mark.parametrize(
    ("keep", "is_kept"),
    [
        pytest.param(copied, True, id="an attribute"),
        pytest.param(lambda model, tensor: tensor.float() * 2, True, id="a tensor made from it"),
        pytest.param(lambda model, tensor: tensor[0, 0].item(), True, id="a number"),
        pytest.param(lambda model, tensor: tensor.numpy().max(), True, id="an array"),
        pytest.param(lambda model, tensor: tensor.narrow(0, 0, 1).shape, False, id="only its shape"),
        pytest.param(lambda model, tensor: None, False, id="nothing"),
    ],
)
def test_contents_outside_parameters_are_refused(tmp_path: Path, keep: Any, is_kept: bool) -> None:
    """A tensor that the engine drops, such as a tied head, may change. What it keeps elsewhere would stay old."""
    model = Net()
    other = {"other": torch.ones(ROWS, COLUMNS).half()}
    kept: list[Any] = []

    def load_weights(weights: Weights) -> None:
        for name, tensor in weights:
            if name == "other":
                kept.append(keep(model, tensor))
            else:
                model.load_weights([(name, tensor)])

    with publish(tmp_path / "old", {**tensors(0), **other}) as opened:
        fill_watched(model, opened, load_weights, (*NAMES, "other"))
    model.down.pack()
    resident = ResidentWeights.of(model)
    with publish(tmp_path / "same", {**tensors(1), **other}) as opened:
        resident.check_updatable(opened.index, lambda module: False)
        update = update_to(model, opened)
        update.load_weights = load_weights
        take(update)
    check(model, tensors(1))
    with publish(tmp_path / "new", {**tensors(1), "other": torch.zeros(ROWS, COLUMNS).half()}) as opened:
        if is_kept:
            with pytest.raises(UpdateRefused, match="keeps contents of 'other' outside its parameters"):
                resident.check_updatable(opened.index, lambda module: False)
        else:
            resident.check_updatable(opened.index, lambda module: False)


def test_unpublished_revisions_count_as_changed(old: OpenModel, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    save_file(tensors(0), folder / "model.safetensors")
    with cluster.safe_open(folder) as plain:
        assert changed_tensors(old.index, plain.index) == set(NAMES)
    assert changed_tensors(old.index, old.index) == set[Any]()


def ranks(job: str) -> list[str]:
    """Run `job` on two gloo ranks, in processes of their own, and return what each printed."""
    code = f"""
import logging, os, sys, torch
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from cluster.errors import DoesNotFit
from engines.resident_weights import Vote, take_together, together
rank, port = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
def raises(error):
    raise error
try:
{textwrap.indent(textwrap.dedent(job), "    ")}
    print("done")
except Exception as error:
    print(type(error).__name__, error, getattr(error, "details", {{}}).get("updated_ranks"))
"""
    (port,) = free_ports(1)
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(port)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    return [process.communicate(timeout=120)[0].strip() for process in started]


@pytest.mark.parametrize(
    ("job", "found"),
    [
        pytest.param("together(None, 2, lambda: Vote('a'), exchanges=False)", ["done", "done"], id="agreed"),
        pytest.param(
            "together(None, 2, lambda: Vote(f'revision {rank}'), exchanges=False)",
            ["UpdateFailed ranks were asked for different", "UpdateFailed ranks were asked for different"],
            id="different revisions",
        ),
        pytest.param(
            "together(None, 2, lambda: raises(KeyError('x')) if rank else None, exchanges=False)",
            ["UpdateFailed rank 1 of 2 failed", "KeyError 'x'"],
            id="one failed before",
        ),
        pytest.param(
            "together(None, 2, lambda: raises(KeyError('x')) if rank else None, exchanges=True)",
            ["ModelBroken rank 1 failed in the exchange", "ModelBroken rank 1 failed in the exchange"],
            id="one failed in the exchange",
        ),
        pytest.param(
            """
            together(None, 2, lambda: None, exchanges=False)
            if rank:
                os._exit(9)
            together(None, 2, lambda: None, exchanges=True)
            """,
            ["ModelBroken a rank is gone. This one has all of the new revision", ""],
            id="one died in the exchange",
        ),
        pytest.param(
            """
            together(None, 2, lambda: None, exchanges=False)
            if rank:
                os._exit(9)
            together(None, 2, lambda: None, exchanges=False)
            """,
            ["UpdateFailed a rank is gone. This one has the revision that it had", ""],
            id="one died before",
        ),
        pytest.param(
            """
            update = SimpleNamespace(
                plan=lambda place: Vote("a", place),
                check_room=lambda: raises(DoesNotFit("no room")) if rank else None,
                prepare=lambda: raises(AssertionError("one has begun")),
            )
            take_together(lambda: nullcontext(update), None, 2, logging.getLogger())
            """,
            ["UpdateFailed rank 1 of 2 failed, so nothing was touched: DoesNotFit: no room", "DoesNotFit no room"],
            id="one has no room",
        ),
    ],
)
def test_ranks_agree_or_say_why_not(job: str, found: list[str]) -> None:
    said = ranks(job)
    assert all(text.startswith(start) for text, start in zip(said, found, strict=True)), said
    if said[0].startswith("ModelBroken"):
        assert said[0].endswith("[0]")
