"""Every public function refuses arguments of a wrong type before it begins anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import cluster
from actors.hosting import host_rank
from cluster.argument_types import checks_arguments
from cluster.errors import ConfigError
from storage.store_ref import Credentials

PUBLIC = {
    **{name: value for name in cluster.__all__ if inspect.isfunction(value := getattr(cluster, name))},
    "host_rank": host_rank,
}
VERBS = {
    name: value
    for name, value in PUBLIC.items()
    if not inspect.iscoroutinefunction(inspect.unwrap(value, stop=inspect.iscoroutinefunction))
}


class Unknown:
    """A type that no parameter accepts."""


# Values of required arguments that are no str
GIVEN = {
    "rank": 0,
    "data_parallel_size": 1,
    "state_dict": {},
    "model": cluster.LoadedModel.__new__(cluster.LoadedModel),
}


def arguments() -> list[tuple[str, str]]:
    """List the arguments that have types. Those of other packages, such as an optimizer, are Any."""
    return [
        (verb, parameter.name)
        for verb, function in VERBS.items()
        for parameter in inspect.signature(function).parameters.values()
        if parameter.annotation not in ("Any", "Any | None")
    ]


@pytest.mark.parametrize(("verb", "argument"), arguments())
def test_every_argument_of_every_verb_is_checked(verb: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.joining.connection.connect", lambda *_, **__: pytest.fail("it has begun"))
    required = [p.name for p in inspect.signature(VERBS[verb]).parameters.values() if p.default is p.empty]
    given: dict[str, Any] = {name: GIVEN.get(name, "model") for name in required}
    with pytest.raises(ConfigError, match=f"^{verb}: {argument} must be .*, not Unknown$"):
        VERBS[verb](**{**given, argument: Unknown()})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"progress": "yes"}, "load: progress must be True or False, a function or None, not str"),
        ({"keep": "yes"}, "load: keep must be True or False, not str"),
        ({"keep": 1}, "load: keep must be True or False, not int"),
        ({"timeout_s": "5"}, "load: timeout_s must be a number or None, not str"),
        ({"timeout_s": float("nan")}, "timeout_s is a number of seconds above 0, or None, not nan"),
        ({"timeout_s": 0}, "timeout_s is a number of seconds above 0, or None, not 0"),
        ({"placement_group": "x"}, "load: placement_group must be a PlacementGroup or None, not str"),
        ({"timeout_s": True}, "load: timeout_s must be a number or None, not bool"),
        ({"tensor_parallel_size": 2.0}, "load: tensor_parallel_size must be a whole number, not float"),
        ({"config": {"arena_bytes": 1}}, "load: config must be a Config or None, not dict of str to int"),
        ({"trusted_keys": "key"}, "load: trusted_keys must be a list (each item a str or a path) or None, not str"),
        ({"trusted_keys": [1, "a"]}, "trusted_keys must be a list .* not list of int and str"),
        ({"layout_rules": {"a": 1}}, "layout_rules must be a dict, a str, a path or None, not dict of str to int"),
        ({"max_memory": []}, "max_memory must be a dict or None, not empty list"),
        ({"device_map": [0]}, "device_map must be .* not list of int"),
    ],
)
def test_the_message_names_argument_type_and_accepted_types(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", "\\(").replace(")", "\\)")):
        cluster.load("model", **options)


def test_a_value_is_never_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        cluster.load("model", credentials={"secret_access_key": "hush"})  # type: ignore[arg-type]
    assert "hush" not in str(caught.value)
    assert "credentials must be a Credentials or None, not dict of str to str" in str(caught.value)


def test_accepted_arguments_are_passed_on() -> None:
    @checks_arguments
    def verb(
        *names: str,
        keys: Sequence[str] = (),
        limit: float | None = None,
        told: bool | Callable[[int], None] = False,
        access: Credentials | None = None,
        **others: object,
    ) -> tuple[object, ...]:
        """Return them."""
        return (*names, keys, limit, told, access, others)

    access = Credentials("id", "secret")
    assert verb("a", keys=("k",), limit=3, told=print, access=access, other=5) == (
        *("a", ("k",), 3, print, access),
        {"other": 5},
    )
    assert verb.__doc__ == "Return them."
    with pytest.raises(TypeError, match="positional"):
        cluster.status("a", "b")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'tp'"):
        cluster.load("model", tp=4)  # type: ignore[call-arg]
