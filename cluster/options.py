"""The options of a load: one class behind `cluster.load`, `cluster.plan`, `cluster.host_rank`, the command line and the
HTTP schema.

    public function --collect(LoadOptions, locals())-->  LoadOptions --cluster.request.make_request--> LoadRequest
    longshore load, plan ------load_options(args)----->
    LoadBody, PlanBody --------options()------------->

Each field names the functions that take it, its help and how the command line spells it. The signatures repeat names,
types and defaults, so that editors show them; `tests/unit/test_options.py` compares them all with the fields.

Arguments of one call that say nothing about the model are not options: where the cluster is (`address`), how long to
wait (`timeout_s`), what to show (`progress`), and the settings (`config`).
"""

# ruff: noqa: RUF009  # `option` is dataclasses.field

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Protocol,
    TypeVar,
    get_args,
    get_type_hints,
    runtime_checkable,
)

from cluster.argument_types import Dtype as Dtype
from cluster.argument_types import DtypeName as DtypeName
from cluster.argument_types import check_types
from cluster.errors import ConfigError
from cluster.fit.options import DeviceMapOptions, FitOptions, GivenMap, GivenMemory, parse_device_map
from cluster.fit.options import FitMode as FitMode
from cluster.layouts.mesh import Layout
from cluster.layouts.rules import LayoutRules
from storage.store_ref import Credentials

if TYPE_CHECKING:
    from cluster.precision.recipes import Precision

T = TypeVar("T")

DeviceName = Literal["auto", "cpu", "cuda"]
PlacementName = Literal["auto", "via_arena", "direct"]
QuantizationName = Literal["fp8", "fp8_tensor", "int8", "int4", "nf4"]

REVISION = re.compile(r"[0-9a-f]{64}")
LOAD, PLAN, HOST_RANK, SAFE_OPEN = "load", "plan", "host_rank", "safe_open"
EVERYWHERE = (LOAD, PLAN, HOST_RANK)
READS = (*EVERYWHERE, SAFE_OPEN)


@runtime_checkable
class PlacementGroup(Protocol):
    """Ray's placement group, without importing Ray."""

    id: Any

    def ready(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class About:
    """Metadata of an option: the functions that take it, and its help text."""

    help: str  # one line, for the command line and the HTTP schema
    functions: tuple[str, ...] = EVERYWHERE  # of `cluster`
    command: bool = True  # the command line takes it, in the verbs of these functions
    flag: str = ""  # of the command line, where it is not made from the name
    short: str = ""  # beside it
    metavar: str = ""
    choices: tuple[str, ...] = ()
    section: str = ""  # of the command line's help
    http: bool = True  # the HTTP service takes it, in the bodies of the functions that do
    command_default: bool | None = None  # where that of the command line is another


def option(default: T, help: str, **more: Any) -> T:
    """Return a field of `LoadOptions`; `more`: fields of `About`."""
    made: T = field(default=default, metadata={"about": About(help, **more)})
    return made


def about(one: Field[Any]) -> About:
    """Return the metadata of an option."""
    found: About = one.metadata["about"]
    return found


def options_of(function: str) -> Iterator[Field[Any]]:
    """Yield the options that "load", "plan" or "host_rank" takes."""
    return (one for one in fields(LoadOptions) if "about" in one.metadata and function in about(one).functions)


def collect(kind: type[T], given: Mapping[str, Any]) -> T:
    """Return a dataclass of options made from those of the `given` names that are its fields.

    Example:
        ```python
        options = collect(LoadOptions, locals())
        ```
    """
    return kind(**{one.name: given[one.name] for one in fields(kind) if one.name in given})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class CheckedOptions:
    """Options whose types are those of their annotations. Raises ConfigError for others."""

    def __post_init__(self) -> None:
        check_types(get_type_hints(type(self)), {one.name: getattr(self, one.name) for one in fields(self)})


@dataclass(frozen=True, slots=True)
class LoadOptions(CheckedOptions):
    """One model, and how it is to be cut, converted, placed and trusted.

    Making one checks everything that needs neither a file nor a network. Raises ConfigError.
    """

    model_uri: str | os.PathLike[str] = field(repr=False)  # until it is parsed, it may hold a secret
    _: KW_ONLY
    tensor_parallel_size: int = option(1, "ranks that each weight matrix is cut over", short="--tp", metavar="N")
    fsdp_size: int = option(1, "ranks that rows of every tensor are spread over", short="--fsdp", metavar="N")
    data_parallel_size: int = option(1, "copies of the model", short="--dp", metavar="N")
    pipeline_parallel_size: int = option(1, "stages of consecutive layers", short="--pp", metavar="N")
    expert_parallel_size: int = option(
        1, "parts of the experts, spread over tensor and data ranks", short="--ep", metavar="N"
    )
    expert_tensor_parallel_size: int = option(
        0,
        "ranks that each expert is cut over (default: tensor_parallel_size / expert_parallel_size)",
        short="--etp",
        metavar="N",
    )
    vocabulary_multiple: int = option(1, "pad embedding and head with zeros to a multiple of this", metavar="N")
    layout_rules: LayoutRules | None = option(
        None,
        'patterns of tensor names and a rule for each, {"**.gate.weight": "replicate"}, as a file of JSON on the '
        "command line; they come before the family's own",
        metavar="FILE",
    )
    dtype: Dtype = option(
        "auto", "cast floating-point tensors while they are loaded (auto: as stored)", choices=get_args(DtypeName)
    )
    quantization: str | None = option(
        None,
        "quantize linear layers and experts while they are loaded (fp8, int8: a scale per row; int4: per 128 weights; "
        "nf4: bitsandbytes', per 64)",
        choices=get_args(QuantizationName),
    )
    skip_quantization: Sequence[str] | None = option(
        None,
        "do not quantize tensors with such names; 'default' stands for embeddings, heads, routers and towers (default: "
        "default)",
        metavar="PATTERN",
    )
    device_map: GivenMap | None = option(
        None,
        "auto, balanced, balanced_low_0, sequential, one device, or modules and their devices "
        "('model.layers.0=0,lm_head=cpu', or a JSON file, on the command line)",
        section="device map",
        metavar="MAP",
    )
    max_memory: GivenMemory | None = option(
        None,
        "limit of each device ('0=20GB,1=20GB,cpu=60GB' on the command line; default: what the node has); without a "
        "device map: auto",
        section="device map",
        metavar="LIMITS",
    )
    offload_folder: str | os.PathLike[str] | None = option(
        None,
        "new or empty folder on the node that loads, for what has no room elsewhere",
        section="device map",
        metavar="FOLDER",
        http=False,
    )
    fit: str = option(
        "strict",
        "strict: refuse what does not fit, and name what would (default); auto: take the first of as given, bfloat16, "
        "fp8, int8, int4 that fits",
        section="fit",
        choices=get_args(FitMode),
        functions=(LOAD, PLAN),
    )
    gpu_memory_utilization: float | None = option(
        None, "part of each GPU's memory, 0 to 1, that may be in use in all", section="fit", metavar="PART"
    )
    reserve_bytes: int | None = option(
        None,
        "kept free on each GPU, or on each host for CPU ranks",
        section="fit",
        flag="--reserve",
        metavar="BYTES",
    )
    device: str = option(
        "auto",
        "where the tensors go (auto: GPU if any)",
        choices=get_args(DeviceName),
        functions=(LOAD, HOST_RANK),
    )
    keep: bool = option(
        False,
        "stay resident when nobody holds the model (the command's default: yes)",
        functions=(LOAD,),
        http=False,
        command_default=True,
    )
    wait_for_resources_s: float = option(
        0,
        "wait that long for enough GPUs, for which an autoscaler may start nodes; 0 refuses at once (default)",
        flag="--wait-for-resources",
        metavar="SECONDS",
        functions=(LOAD,),
    )
    placement: str = option(
        "auto",
        "chunks through the node's arena (cached), direct into a rank's host memory, or auto: direct for local files, "
        "and when the arena is too small to keep them (default)",
        choices=get_args(PlacementName),
        functions=(LOAD,),
    )
    placement_group: PlacementGroup | None = option(
        None, "a Ray placement group: rank i takes bundle i", functions=(LOAD,), command=False, http=False
    )
    revision: str | None = option(
        None, "refuse every other revision of the model (64 hex digits)", metavar="HEX", functions=READS
    )
    trusted_keys: Sequence[str | os.PathLike[str]] | None = option(
        None,
        "refuse a manifest that is not signed with one of these public keys (base64 or a file, :NAME behind it where "
        "the key is trusted for that model alone; default: LONGSHORE_TRUSTED_KEYS)",
        flag="--trusted-key",
        metavar="KEY",
        http=False,
        functions=READS,
    )
    signed_name: str | None = option(
        None,
        "name under which the manifest must be signed, if it must be (default: the path without scheme and bucket)",
        metavar="NAME",
        functions=READS,
    )
    endpoint_url: str | None = option(
        None, "of an S3-compatible server", section="store", metavar="URL", functions=READS
    )
    region: str | None = option(
        None, "of the bucket (default: as the environment says)", section="store", metavar="NAME", functions=READS
    )
    profile: str | None = option(
        None, "named profile of the AWS configuration", section="store", metavar="NAME", http=False, functions=READS
    )
    anonymous: bool = option(False, "send unsigned requests (public buckets)", section="store", functions=READS)
    credentials: Credentials | None = option(
        None, "keys of the store; they travel in messages only", command=False, http=False, functions=READS
    )

    def __post_init__(self) -> None:
        CheckedOptions.__post_init__(self)
        for name in ("skip_quantization", "trusted_keys"):  # a list may change, and a generator cannot be pickled
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(given))
        for name, choices in (("device", get_args(DeviceName)), ("placement", get_args(PlacementName))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r:.40}")
        if not is_seconds(self.wait_for_resources_s):
            raise ConfigError(f"wait_for_resources_s must be 0 or more seconds, not {self.wait_for_resources_s!r:.40}")
        fit, precision, mapping = self.fitting(), self.precision(), self.mapping()
        if fit.mode == "strict" and not precision.quantization and precision.skip != type(precision)().skip:
            raise ConfigError("skip_quantization says what is not quantized, but there is no quantization")
        fit.check_device(device_of(self.device, mapping))
        check_signed_name(self.signed_name)
        check_revision(self.revision)

    def part(self, kind: type[T]) -> T:
        """Return a dataclass whose fields are some of the options."""
        return collect(kind, {one.name: getattr(self, one.name) for one in fields(self)})

    def layout(self) -> Layout:
        """Return the sizes. Raises ConfigError for sizes that no mesh has."""
        return self.part(Layout)

    def fitting(self) -> FitOptions:
        """Return what has to stay free. Raises ConfigError."""
        return FitOptions(self.fit, self.gpu_memory_utilization, self.reserve_bytes)

    def precision(self) -> Precision:
        """Return the conversion. Raises ConfigError for a dtype or a quantization that there is not."""
        from cluster.precision.recipes import make_precision  # which imports numpy

        return make_precision(self.dtype, self.quantization, self.skip_quantization)

    def mapping(self) -> DeviceMapOptions | None:
        """Return the device map; None when there is none. Raises ConfigError."""
        return parse_device_map(self.device_map, self.max_memory, self.offload_folder, self.layout(), self.device)


def device_of(device: str, mapping: DeviceMapOptions | None) -> str:
    """Return the device of the ranks: "cpu" or "cuda" when the device map decides it."""
    if mapping is None or mapping.gpus is None:
        return device
    return "cuda" if mapping.gpus else "cpu"


def is_seconds(given: float) -> bool:
    """Return whether it is a finite number from 0 on."""
    return math.isfinite(given) and given >= 0


def check_signed_name(given: str | None) -> str:
    """Return the name; "" for None, which asks for the path of the URI. Raises ConfigError."""
    from storage.publishing.signing import MAX_NAME_CHARACTERS, is_name  # which imports pydantic

    if given is not None and not is_name(given):
        raise ConfigError(f"signed_name is one line of at most {MAX_NAME_CHARACTERS} characters, not {given!r:.80}")
    return given or ""


def check_revision(given: str | None) -> str:
    """Return the revision; "" for None, which asks for none. Raises ConfigError."""
    if given is not None and not REVISION.fullmatch(given):
        raise ConfigError(
            f"a revision is 64 hex digits, not {given!r:.80}",
            hint="whole, as `longshore publish`, `longshore plan` and reports of loads show it",
        )
    return given or ""
