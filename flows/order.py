"""What a flow is asked to do, as typed parameters: Prefect's pages make forms of them and its server enforces them.

Descriptions, bounds and choices come from the models alone. Settings stand in for sections of the configuration file,
and hold only those that the stage reads.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from data_contracts.config import SLICES, Config
from data_contracts.cost import Frozen
from data_contracts.records import Origin, Ref
from flows.workspace import Workspace

ConfigFile = Annotated[str, Field(min_length=1)]
Place = Literal["in_process", "process", "docker", "kubernetes"]
"""Where the stages of a pipeline run: in its own process, or each as its deployment of that name."""


class StageOrder(Frozen):
    """What a stage's own flow is asked to do."""

    run: str | None = Field(None, description="Past pipeline run whose inputs are used (see `lazytrain status`).")
    round: int | None = Field(None, ge=1, description="Round of that run; unset is the stage's last call.")
    inputs: dict[str, tuple[Ref, ...]] = Field(
        default_factory=dict, description="References by input name; they stand in for the past run's."
    )
    refresh: bool = Field(False, description="Make a new attempt even where a commit exists.")
    caller: Origin | None = Field(None, description="Set by a pipeline that calls this stage; leave it unset.")


class Settings(Frozen):
    """Sections that stand in for those of the configuration file; unset ones are read from the file."""

    def over(self, workspace: Workspace) -> Workspace:
        """Return `workspace` with these sections in place of its own."""
        return workspace.with_sections({name: getattr(self, name) for name in self.model_fields_set})


@cache
def settings_of(verb: str) -> type[Settings]:
    """Return the model of the sections that stage `verb` reads, each optional."""
    fields: dict[str, Any] = {}
    for name in SLICES[verb]:
        section = Config.model_fields[name]
        kind: Any = section.annotation
        about = (kind.__doc__ or "").partition("\n")[0] if issubclass(kind, Frozen) else "Of every random number."
        bounded = Annotated[(kind, *section.metadata)] if section.metadata else kind
        fields[name] = (bounded | None, Field(None, description=about))
    return create_model(f"{verb.capitalize()}Settings", __base__=Settings, __doc__=Settings.__doc__, **fields)
