"""AdamW whose moments are held in a form of each block's own, chosen by what the cheaper forms would risk.

For a few updates all moments have the cheapest form, and a sample of every matrix's gradients is kept. From the sample
each form's update is made and compared with AdamW's own: the risk of a form is its relative squared error, weighed by
the matrix's size. Then the forms of all blocks are assigned at once, the least risk in sum within a budget of bytes
(`assign.py`), and the moments change their form. A block is a layer, or what lies below or above the layers.
Source of the problem: BAOC (arXiv 2605.04711), of which the abstract alone was at hand: risks and forms are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from data_contracts.errors import ConfigError
from stages.model.batch import TokenBatch
from stages.technique.adam_mini import AdamMini, head_rows
from stages.technique.assign import assign
from stages.technique.blocks import Block, layer_blocks, outer_blocks
from stages.technique.optimizer import Adam, How
from stages.technique.states import AdamW8bit, HeldAdamW, has_8bit
from stages.technique.states_4bit import AdamW4bit
from stages.technique.step import StepResult, trainable

if TYPE_CHECKING:
    from data_contracts.config import TrainConfig

SAMPLE = 4096
"""Numbers of a matrix whose gradients are kept, in whole rows."""
PROBE = "probe."
CHEAPEST, EXACT = "4bit", "float32"
SCALARS = 256
"""Bytes of codes, borders and scalars that the update of a parameter makes, at the most."""


def form_of(name: str, params: Iterable[Any], rows: Mapping[Tensor, int], settings: Mapping[str, Any]) -> HeldAdamW:
    """Return AdamW over `params` with moments in a form; `rows` are those of a block of Adam-mini."""
    if name == "mini":
        return AdamMini(params, rows, **settings)
    return {EXACT: HeldAdamW, "8bit": AdamW8bit, CHEAPEST: AdamW4bit}[name](params, **settings)


def form_names() -> list[str]:
    """Return the forms there are, dearest first; 8 bits ask for bitsandbytes."""
    return [EXACT, "mini", *(["8bit"] if has_8bit() else []), CHEAPEST]


def budget_of(model: nn.Module, share: float) -> int:
    """Return the bytes that moments may take: `share` of two float32 numbers a parameter."""
    return int(share * 8 * sum(parameter.numel() for parameter in model.parameters()))


class FormsAdamW(HeldAdamW):
    """AdamW with a form for each parameter.

    Args:
        params, settings: as of `HeldAdamW`.
        rows: as of `form_of`.

    Attributes:
        form: name of each parameter's form, the cheapest at first.
        samples: gradients kept of each matrix, one more an update; None when no more are kept.
    """

    def __init__(self, params: Iterable[Any], rows: Mapping[Tensor, int], **settings: Any) -> None:
        super().__init__(params, **settings)
        every = [item for group in self.param_groups for item in group["params"]]
        self.rows, self._settings = rows, settings
        self.forms = {name: form_of(name, every, rows, settings) for name in form_names()}
        self.form = dict.fromkeys(every, CHEAPEST)
        self.samples: dict[Tensor, list[Tensor]] | None = {}

    def update(self, parameter: nn.Parameter, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        """Move one parameter and its moments."""
        if self.samples is not None and parameter.ndim >= 2:
            assert parameter.grad is not None
            kept = parameter.grad[: self._sampled(parameter)].clone()
            self.samples.setdefault(parameter, []).append(kept)
        self.forms[self.form[parameter]].update(parameter, state, group)

    def empty_state(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter that was never updated."""
        return self.forms[self.form[parameter]].empty_state(parameter)

    def encode(self, parameter: Tensor, average: Tensor, square: Tensor, updates: int) -> dict[str, Any]:
        """Return the state that holds float32 moments as nearly as the parameter's form can."""
        return self.forms[self.form[parameter]].encode(parameter, average, square, updates)

    def decode(self, parameter: Tensor, state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return (exp_avg, exp_avg_sq) in float32."""
        return self.forms[self.form[parameter]].decode(parameter, state)

    def _sampled(self, parameter: Tensor) -> int:
        """Return how many of a matrix's first rows are sampled: of more than one block of Adam-mini, whole ones."""
        block = self.rows.get(parameter, 1)
        rows = -(-SAMPLE // parameter.shape[1])
        return min(rows if rows < block else rows // block * block, parameter.shape[0])

    def size(self, parameter: Tensor, name: str) -> int:
        """Return the bytes of a parameter's moments in a form."""
        shaped = torch.empty(parameter.shape, device="meta")
        form = form_of(name, [shaped], {shaped: self.rows.get(parameter, 1)}, self._settings)
        return sum(value.nbytes for value in form.empty_state(shaped).values() if isinstance(value, Tensor))

    def sample_bytes(self, updates: int) -> int:
        """Return the bytes of samples of so many updates."""
        return sum(4 * updates * self._sampled(item) * item.shape[1] for item in self.form if item.ndim >= 2)

    @torch.no_grad()
    def risk(self, parameter: Tensor, name: str, gradients: Sequence[Tensor]) -> float:
        """Return Σ ‖u' - u‖² / Σ ‖u‖² over updates of sampled gradients, u AdamW's own and u' those of a form."""
        weights = [nn.Parameter(torch.zeros_like(gradients[0])) for _ in range(2)]
        rows: dict[Tensor, int] = {item: min(self.rows.get(parameter, 1), len(item)) for item in weights}
        settings = self._settings | {"lr": 1.0, "weight_decay": 0.0}
        forms = [form_of(form, [item], rows, settings) for form, item in zip((name, EXACT), weights, strict=True)]
        off = scale = 0.0
        for gradient in gradients:
            moved = []
            for weight, form in zip(weights, forms, strict=True):
                before, weight.grad = weight.detach().double(), gradient
                form.step()
                moved.append(weight.detach().double() - before)
            off += float((moved[0] - moved[1]).square().sum())
            scale += float(moved[1].square().sum())
        return off / max(scale, 1e-300)


class RiskAdam(Adam):
    """AdamW over everything, moments in forms assigned by risk.

    Args:
        model, train, rate: as of `Adam`.
        share: of float32 moments' bytes that may be held.
        probe: updates whose gradients are sampled.

    Raises `ConfigError` where the cheapest forms and the samples take more than the share.
    """

    def __init__(self, model: nn.Module, train: TrainConfig, rate: float, *, share: float, probe: int) -> None:
        super().__init__(model, train, rate)
        self.probe, self.budget, self.chosen = probe, budget_of(model, share), list[str]()
        below, above = outer_blocks(model)
        self.blocks: list[Block] = [block for block in (below, *layer_blocks(model), above) if block]
        groups = [{"params": part["params"], "weight_decay": part["weight_decay"]} for part in self.adamw.param_groups]
        settings = {"lr": rate, "betas": (train.beta1, train.beta2), "eps": train.epsilon}
        self.forms = self.adamw = FormsAdamW(groups, head_rows(model), **settings)
        self.sizes = [
            {name: sum(self.forms.size(item, name) for item in block.values()) for name in self.forms.forms}
            for block in self.blocks
        ]
        least = sum(size[CHEAPEST] for size in self.sizes) + self.forms.sample_bytes(probe)
        if least > self.budget:
            raise ConfigError(
                f"moments take at most `state_share` = {share} of float32's, {self.budget:,} bytes",
                f"those of 4 bits and {probe} samples of gradients take {least:,}",
                "raise `state_share`, or lower `probe_steps`",
            )

    def step(self, window: Sequence[TokenBatch], rate: float, **how: Unpack[How]) -> StepResult:
        """Take one step of AdamW; after the last one of the probe, assign the forms."""
        result = super().step(window, rate, **how)
        if not self.chosen and self.updates >= self.probe:
            self._put(self._assigned())
        return result

    def _assigned(self) -> list[str]:
        samples, names = self.forms.samples, list(self.forms.forms)
        assert samples is not None
        options = []
        for block, sizes in zip(self.blocks, self.sizes, strict=True):
            found = [
                (sizes[name], sum(item.numel() * self.forms.risk(item, name, samples[item])
                                  for item in block.values() if item in samples))
                for name in names
            ]  # fmt: skip
            options.append(found)
        places = assign(options, self.budget)
        assert places is not None, "the cheapest forms fit"
        return [names[place] for place in places]

    def _put(self, chosen: Sequence[str]) -> None:
        """Change every block's form; each parameter's moments are the nearest in the new one."""
        self.chosen, self.forms.samples = list(chosen), None
        for block, name in zip(self.blocks, chosen, strict=True):
            for item in block.values():
                self._change(item, name)

    def _change(self, parameter: nn.Parameter, name: str) -> None:
        """Change a parameter's form, where it has another."""
        state = self.forms.state.get(parameter)
        if not state or self.forms.form[parameter] == name:
            self.forms.form[parameter] = name
            return
        pair = self.forms.decode(parameter, state)
        self.forms.form[parameter] = name
        self.forms.state[parameter] = self.forms.encode(parameter, *pair, int(state["step"]))

    def plain(self) -> dict[str, Any]:
        """Add the forms that were assigned, none while gradients are sampled."""
        return super().plain() | {"forms": self.chosen}

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments in float32, and the samples so far."""
        return super().tensors() | self._sampled()

    def held(self) -> dict[str, Tensor]:
        """Return the states as they are, and the samples so far."""
        return super().held() | self._sampled()

    def _sampled(self) -> dict[str, Tensor]:
        samples = self.forms.samples or {}
        return {
            PROBE + name: torch.stack(samples[item]) for name, item in trainable(self.model).items() if item in samples
        }

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on with the same forms, or with the samples so far."""
        self.forms.state.clear()
        if plain["forms"]:
            self._put(plain["forms"])
        else:
            named = trainable(self.model)
            self.chosen, self.forms.form = [], dict.fromkeys(self.forms.form, CHEAPEST)
            self.forms.samples = {
                named[name.removeprefix(PROBE)]: list(value.to(named[name.removeprefix(PROBE)].device).unbind())
                for name, value in tensors.items()
                if name.startswith(PROBE)
            }
        super().restore(plain, {name: value for name, value in tensors.items() if not name.startswith(PROBE)})

    def update_bytes(self, device: str) -> int:
        """Return what the update holds on `device` beside weights, gradients and the budget, whatever is assigned.

        While a block has a form, all others hold no more than in float32. The change of forms after the probe, which
        decodes a parameter's moments of four bits to float32, meets no gradients.
        """
        left = self.budget - sum(size[CHEAPEST] for size in self.sizes)
        over = sum(size[EXACT] for size in self.sizes) - self.budget
        dearest = max(
            min(0, over + size[name] - size[EXACT]) + max(form.scratch(item, device) for item in block.values())
            for block, size in zip(self.blocks, self.sizes, strict=True)
            for name, form in self.forms.forms.items()
            if size[name] - size[CHEAPEST] <= left
        )
        numbers = [item.numel() for item in self.forms.form]
        return max(dearest, 12 * max(numbers) - 4 * sum(numbers)) + SCALARS

    def stand(self) -> dict[str, list[Tensor]]:
        """Put zero moments in forms that fill the budget, dearer ones from below; return them."""
        left = self.budget - sum(size[CHEAPEST] for size in self.sizes)
        chosen = []
        for size in self.sizes:
            name = next(name for name in self.forms.forms if size[name] - size[CHEAPEST] <= left)
            left -= size[name] - size[CHEAPEST]
            chosen.append(name)
        self.forms.state.clear()
        self._put(chosen)
        return super().stand()
