"""A mixture is made where one is asked for, from what its method reads and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from data_contracts.config import Config, parse
from data_contracts.errors import MethodError
from data_contracts.records import Ref, Result
from flows.mixing import mixed

NAMES = ("pool_tokens", "base", "plan", "checkpoint", "target_tokens", "scores", "features", "previous")


def config(mixture: dict[str, Any] | None) -> Config:
    return parse({"model": {"path": "m"}, "data": {"pool": ["a"], "target": ["b"]}, "select": {"mixture": mixture}})


def ref(name: str) -> Ref:
    return Ref(contract="mixture/1", run="r" * 32, path=name, digest="0" * 64)


def call_of(mixture: dict[str, Any] | None) -> tuple[list[str], tuple[Ref, ...]]:
    seen: list[str] = []

    def call(verb: str, **inputs: tuple[Ref, ...]) -> Result:
        assert verb == "mix"
        assert all(refs == (ref(name),) for name, refs in inputs.items())
        seen.extend(sorted(inputs))
        return Result(stage="mix", identity="i", run="r", cached=False, refs={"mixture": ref("made")})

    given = {name: (ref(name),) for name in (*NAMES, "example_losses")}
    made = mixed(config(mixture), call, **given)
    return seen, made


@pytest.mark.parametrize(
    ("mixture", "inputs"),
    [
        ({"method": "fixed"}, ["pool_tokens"]),
        ({"method": "op_mix"}, ["base", "checkpoint", "plan", "pool_tokens", "target_tokens"]),
        ({"method": "gst"}, ["features", "pool_tokens", "scores"]),
        ({"method": "odm"}, ["example_losses", "pool_tokens", "previous"]),
    ],
)
def test_the_stage_is_given_what_the_method_reads(mixture, inputs):
    assert call_of(mixture) == (inputs, (ref("made"),))


def test_nothing_is_made_where_no_mixture_is_asked_for_and_an_unknown_one_is_refused():
    assert call_of(None) == ([], ())
    with pytest.raises(MethodError, match="did you mean 'op_mix'"):
        call_of({"method": "opmix"})
