"""Rules for model families without a built-in table, from the caller's installation of transformers.

The planner runs where the store can be reached. That may be another machine, where transformers is not installed. So
the planner raises UnknownFamily with the family's name. The caller's process looks the name up in transformers and
repeats the request with rules:

    do(request) --UnknownFamily("olmo2")--> AutoConfig's class for "olmo2" --> do(request with layout_rules)

Only the name comes from the store. It selects a config class of the installed library, and that class's plan. Nothing
is downloaded, and no code of a model's repository runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, TypeVar

from cluster.errors import UnknownFamily
from cluster.layouts.families import Rows, rows_of_plan
from cluster.request import LoadRequest

Answer = TypeVar("Answer")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


def with_live_rules(request: LoadRequest, do: Callable[[LoadRequest], Answer]) -> Answer:
    """Return `do(request)`. For a model of an unknown family, repeat it with the rules from transformers.

    Exceptions of `do` pass through. The hint of UnknownFamily says where rules were looked for.
    """
    try:
        return do(request)
    except UnknownFamily as error:
        family, text_family = (str(error.details.get(key) or "") for key in ("family", "text_family"))
        if find_spec("transformers") is None:
            raise _with_hint(
                error, "its rules can be read from transformers, which is not installed: pip install transformers"
            ) from None
        try:
            rows = live_rows(family, text_family)
        except Exception as problem:  # the import of a library may raise anything
            hint = f"transformers is installed, but its plan cannot be read ({type(problem).__name__}: {problem})"
            raise _with_hint(error, hint) from problem
        if not rows:
            raise _with_hint(error, f"transformers {_version()} has no tensor-parallel plan for it") from None
        own = request.layout_rules or {}
        more = {pattern: str(rule) for pattern, rule in rows if pattern not in own}
        again = replace(request, layout_rules={**own, **more})
    try:
        return do(again)
    except UnknownFamily as error:
        raise _with_hint(
            error, f"the plan of transformers {_version()} was used, but does not name these tensors"
        ) from None


def live_rows(family: str, text_family: str = "") -> Rows:
    """Return the rules of transformers for a model type, or none if it has no plan. Needs no torch."""
    config = _config_class(family)
    nested = _config_class(text_family) or _part_of(config, "text_config")
    # In a multimodal model, the config of the language model has the plan.
    return _rows_of_class(nested, nested=True) or _rows_of_class(config, nested=False)


def _config_class(family: str) -> Any:
    """Return the config class of transformers for a model type, or None."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family] if _NAME.fullmatch(family) and family in CONFIG_MAPPING else None


def _part_of(config: Any, name: str) -> Any:
    """Return the class of a nested config. Different versions of transformers name the table differently."""
    for table in ("sub_configs_defaults", "sub_configs"):
        parts = getattr(config, table, None)
        if isinstance(parts, dict) and name in parts:
            return parts[name]
    return None


def _rows_of_class(config: Any, *, nested: bool) -> Rows:
    plan, expert_plan = (getattr(config, f"base_model_{kind}_plan", None) or {} for kind in ("tp", "ep"))
    return rows_of_plan(plan, expert_plan, nested=nested) if plan else ()


def _with_hint(error: UnknownFamily, hint: str) -> UnknownFamily:
    return UnknownFamily(error.message, hint=f"{hint}. {error.hint}", **error.details)


def _version() -> str:
    from importlib.metadata import version

    return version("transformers")
