"""Faults of public training code, each with the test that holds its right value. Rows whose tests stand elsewhere:

     1 transformers#34191, #34198: the mean of micro-batches' means is not the window's mean
                            ../stages/technique/test_step.py::test_the_accumulated_gradient_equals_that_of_the_whole_window
     2 torchtune#1875: nor is the mean over ranks
                            ../stages/technique/test_step.py::test_two_ranks_with_unequal_shares_give_the_gradient_of_the_whole_window
     4 mlx-lm#1413: nor do a last window that is not full and one without answers count as full ones
                            test_train_cases.py::test_T02_fewer_rows_than_a_batch_make_one_smaller_step
                            ../stages/technique/test_step.py::test_a_window_in_which_no_token_counts_is_not_applied
     5 peft#2321, #1043, transformers#31293: a merged model computes something else
                            ../stages/model/test_checkpoint.py::test_the_merged_model_of_an_adapter_checkpoint_computes_the_same
     6 unsloth-zoo#810: adapters of a four-bit base are merged into the weights that it was made from
                            ../stages/technique/test_qlora.py::test_merging_gives_a_plain_model_that_computes_what_was_trained
     7 qlora#28, #29: adapters of a four-bit base are merged into another base, or not at all
                            ../stages/technique/test_qlora.py::test_merging_gives_a_plain_model_that_computes_what_was_trained
     8 transformers#45127, peft#2972, LlamaFactory#10832: ties are lost or overwritten on merging and loading
                            ../stages/technique/test_methods.py::test_a_merged_model_survives_a_reload_with_its_ties
                            ../stages/technique/test_methods.py::test_a_tied_head_is_no_target_and_an_untied_one_is
     9 trl#1230, #805, #3067, alignment-handbook#204: documents of a packed row see each other
                            ../stages/model/test_loss.py::test_the_mask_lets_a_token_see_its_own_document_up_to_itself
                            ../stages/model/test_loss.py::test_packed_equals_unpacked_for_every_document
    11 trl#1053, #1191, #1920, #1493, unsloth#2095: the answer is looked for by a text that tokenises otherwise in place
                            ../stages/model/test_tokenise.py::test_an_answer_that_repeats_the_question_is_masked_by_place_and_not_by_search
    12 unsloth#1290, #1262, #11321: nothing is supervised, and training goes on at a loss of 0
                            ../stages/model/test_tokenise.py::test_no_supervised_token_or_one_past_the_embedding_is_refused
    13 trl#4147, #4201, marin#7237, Megatron-Bridge#3359: turns are masked that are answers, or the other way round
                            ../stages/model/test_tokenise.py::test_exactly_the_answers_are_supervised
                            ../stages/model/test_tokenise.py::test_truncation_keeps_the_limit_and_an_answer_token
    14 unsloth#416, llm-course#33, granite-3.1#2: a pad token that is the end token hides real ends
                            test_train_cases.py::test_T01_a_pad_token_that_is_the_end_token_hides_no_real_end
    17 transformers#12878, #15466: logits of all validation rows are kept, or metrics of batches averaged
                            ../stages/train/test_validate.py::test_batches_do_not_change_the_loss_and_their_operations_are_those_that_run
    18 transformers#35782, #27820, lightning#688: a run killed while it saves leaves half a checkpoint, which is taken up
                            ../stages/train/test_resume.py::test_a_cut_snapshot_is_passed_over_and_one_of_other_work_too
                            ../faults/test_kill_faults.py::test_08_12_15_a_signal_at_any_word_with_the_store
    19 torchtune#278, #2490: a resumed run does not go on where its data and optimizer stood
                            ../stages/train/test_resume.py::test_a_segment_killed_several_times_inside_an_epoch_is_bit_identical
                            ../stages/train/test_order.py::test_segments_one_after_the_other_are_one_stream
    21 bitsandbytes#152, #227, #1382, #782: 8-bit states do not survive saving, or are others than the library's
                            ../stages/technique/test_savings.py::test_states_survive_a_snapshot_to_the_bit
                            ../stages/technique/test_savings.py::test_a_step_in_8_bits_is_bitsandbytes_own
    22 GaLore#58, LlamaFactory#5887: singular vectors that do not converge end the run
                            ../stages/technique/test_projected.py::test_a_gradient_without_singular_vectors_leaves_the_basis_that_is_known
    23 MeZO#42, #6, ZO-LLM#13: what was perturbed does not come back, or the slope is not that of the direction
                            ../stages/technique/test_zeroth.py::test_at_a_rate_of_zero_every_byte_comes_back_also_after_an_error
                            ../stages/technique/test_zeroth.py::test_the_slope_is_the_derivative_along_the_direction
    24 torchtune#1965: memory runs out in the middle of an epoch, where a longer row comes
                            ../stages/plan/test_plan.py::test_the_preferred_technique_is_chosen_where_it_fits_and_planned_on_the_longest_row
    25 accelerate#3297: an estimate of memory without activations, batch and adapters
                            ../stages/plan/test_estimate.py::test_the_predicted_peak_is_what_a_real_step_takes
                            ../stages/plan/test_estimate.py::test_recomputation_and_lora_save_what_they_should
    26 read in code, LOZO: the update draws another direction than the perturbation at a refresh
                            ../stages/technique/test_zeroth.py::test_weights_move_along_the_direction_that_was_perturbed_at_every_window
       read in code, BAdam: K - 1 steps of the first block; norms decay; layers.1 is layers.10 too; resume forgets the order
                            ../stages/technique/test_badam.py::test_each_layer_trains_alone_for_its_steps_as_torchs_adamw_would_train_it
                            ../stages/technique/test_badam.py::test_vectors_do_not_decay
                            ../stages/technique/test_badam.py::test_layer_one_is_not_layers_ten_to_nineteen
                            ../stages/technique/test_optimizer.py::test_a_life_interrupted_after_any_window_ends_in_the_same_bytes
       read in code, DQT: weights stay stored as floats; rounding drifts
                            ../stages/technique/test_held.py::test_weights_of_dqt_are_really_n_bits_before_and_after_steps
                            ../stages/technique/test_held.py::test_a_dqt_step_is_adamw_in_the_mean_however_small_beside_the_numbers_distance

Here: 3 (unsloth-zoo#1023), 8 with a grown vocabulary, 10, 15 to 18, 20 (alpaca-lora#72), 24. Of 17, 19, 20 and 24 the
threads named were at hand, LlamaFactory#1595, verl#7401, entrenar#294, LlamaFactory#1972 and llama-cookbook#792 were not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from data_contracts.config import ModelConfig
from stages.model.batch import Row, TokenTable, collate
from stages.model.checkpoint import load_merged, save_checkpoint
from stages.model.load import load_model, pin_model
from stages.model.loss import document_losses
from stages.model.packing import collate_packed
from stages.plan.estimate import Estimator
from stages.plan.trace import Shape
from stages.technique.recompute import recompute
from stages.train import snapshot
from stages.train.snapshot import Snapshots
from stages.train.validate import Validation
from stages.workers.group import Group
from tests.local_work import LocalWork
from tests.stages.technique.setting import TRAIN, handed_out, llama, pinned, rows, started, technique, windows
from tests.stages.train.small import VOCABULARY, House, token_columns, write_model
from tests.stages.train.test_stage import train

HERE = Path(__file__).parent


def test_every_row_names_tests_that_exist() -> None:
    names = re.findall(r"([\w./]+\.py)::(\w+)", __doc__ or "")
    assert len(names) > 25
    for file, name in names:
        assert f"def {name}(" in (HERE / file).resolve().read_text(encoding="utf-8"), f"{file}::{name}"


@pytest.mark.parametrize("chunks", [1, 8])
def test_03_a_window_is_divided_by_its_tokens_once_however_it_is_cut_and_its_head_too(chunks: int) -> None:
    """There the loss in parts had divided by the window's tokens, and the trainer by the micro-batches again."""
    found = []
    for size in (4, 2, 1):
        model = technique("full").wrap(llama(2, dtype=torch.float64)).train()
        some = rows(4)
        window = [collate(some[at : at + size]) for at in range(0, 4, size)]
        result = technique("full").optimizer(model, TRAIN, 1e-2, 0).step(window, 1e-2, clip=1.0, loss_chunks=chunks)
        found.append((result.gradient_norm, result.loss))
    batch = collate(rows(4))
    model = llama(2, dtype=torch.float64)
    logits = model(input_ids=batch.input_ids_BT).logits.flatten(0, 1)[batch.answers.source_N]
    loss = torch.nn.functional.cross_entropy(logits, batch.answers.label_N)
    loss.backward()
    norm = torch.stack([item.grad.square().sum() for item in model.parameters()]).sum().sqrt()
    for pair in found:
        assert pair == pytest.approx((float(norm), float(loss)), rel=1e-9)


def test_08_a_tied_grown_vocabulary_survives_adapters_merging_and_loading(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    words = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
    words.add_tokens(["<new>"])
    words.save(str(tmp_path / "model/tokenizer.json"))
    pin = pin_model(ModelConfig(path="model"), tmp_path, resize=True)
    method = technique("lora", r=2)
    torch.manual_seed(0)
    model = method.wrap(load_model(pin)).train()
    assert model.get_input_embeddings().weight.shape[0] == VOCABULARY + 1
    optimizer = method.optimizer(model, TRAIN, 1e-2, 0)
    for window in windows(2):
        optimizer.step(window, 1e-2, clip=1.0)
    model.eval()
    ids = torch.arange(2, VOCABULARY + 1)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        save_checkpoint(tmp_path / "c", model, pin, {}, {"technique": {"method": "lora", "r": 2}, "step": 2})
        merged = load_merged(tmp_path / "c", pin)
        merged.save_pretrained(tmp_path / "merged")
        again = type(merged).from_pretrained(tmp_path / "merged")
        for found in (merged, again):
            assert found.get_input_embeddings().weight is found.get_output_embeddings().weight
            torch.testing.assert_close(found(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-5)


def test_10_positions_restart_and_no_label_crosses_from_one_document_into_the_next() -> None:
    documents = rows(5)
    packed = collate_packed([documents[:3], documents[3:]])
    width, wanted = packed.shape[1], []
    for place, group in enumerate((documents[:3], documents[3:])):
        at = 0
        for row in group:
            length = len(row.input_ids)
            assert packed.positions_BT[place, at : at + length].tolist() == list(range(length))
            wanted += [
                (place * width + at + token - 1, int(row.input_ids[token]))
                for token in range(1, length)  # a document's first token is predicted from nothing
                if row.answer_mask[token]
            ]
            at += length
    answers = packed.answers
    assert sorted(zip(answers.source_N.tolist(), answers.label_N.tolist(), strict=True)) == sorted(wanted)


def test_15_with_a_frozen_base_and_recomputed_blocks_every_adapter_has_its_gradient() -> None:
    found = []
    for places in ((), (0, 1, 2)):
        torch.manual_seed(0)
        model = technique("lora", r=2).wrap(llama(3)).train()
        with torch.no_grad():
            for name, item in model.named_parameters():
                if "lora_B" in name:
                    item.normal_()
        recompute(model, places)
        model(input_ids=collate(rows(2)).input_ids_BT).logits.square().mean().backward()
        found.append({name: item.grad for name, item in model.named_parameters() if item.requires_grad})
    plain, again = found
    assert set(plain) == set(again)
    assert len(plain) == 2 * 3 * 7  # A and B of seven linear layers in each of three blocks
    assert all(grad is not None and grad.any() for grad in again.values())
    assert all(torch.equal(plain[name], grad) for name, grad in again.items())


@pytest.mark.parametrize("method", ["full", "lora"])
def test_16_what_trains_is_float32_though_the_base_was_saved_in_half_precision(tmp_path: Path, method: str) -> None:
    write_model(tmp_path / "model")
    llama(2).to(torch.float16).save_pretrained(tmp_path / "model")
    pin = pin_model(ModelConfig(path="model"), tmp_path)
    chosen = technique(method)
    model = chosen.wrap(load_model(pin)).train()
    optimizer = chosen.optimizer(model, TRAIN, 1e-2, 0)
    assert {item.dtype for item in model.parameters() if item.requires_grad} == {torch.float32}
    for window in windows(2):
        assert optimizer.step(window, 1e-2, clip=1.0, precision="bfloat16").applied
    assert {value.dtype for value in optimizer.tensors().values()} == {torch.float32}
    assert all(item.isfinite().all() for item in model.parameters())


def test_17_validation_holds_one_batch_of_logits_however_many_rows_there_are(tmp_path: Path) -> None:
    model, found = llama(2).eval(), []
    for count in (4, 64):
        work = LocalWork(tmp_path / str(count), {"tokens": "tokens"})
        columns = token_columns(count, 3, longest=4)
        lengths = [len(ids) for ids in columns["input_ids"]]
        work.table("tokens", columns)
        validation = Validation(work.artifact("tokens").folder / "data.arrow", None, max(lengths))
        losses = []
        taken = handed_out(lambda held=losses, check=validation: held.append(check(model, Group(), "float32")[0]))
        found.append((taken, losses[0]))
    (few, _), (many, loss) = found
    assert loss.documents == 64
    a_row_of_logits = 4 * VOCABULARY
    assert 0 <= many - few < a_row_of_logits + 64 * 60, "two sums a document, and no logits"


def test_18_a_snapshot_that_is_cut_at_any_moment_leaves_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, state = technique("full"), {"position": {"best": None, "guard": {}}}
    optimizer = method.optimizer(method.wrap(llama(2)).train(), TRAIN, 1e-2, 0)
    snapshots = Snapshots(tmp_path, "work")
    written = ({"rng.cpu.0": torch.get_rng_state()}, state, {})
    snapshots.write(1, optimizer, *written)
    before = {path.name: path.read_bytes() for path in (tmp_path / "000000001").iterdir()}
    optimizer.step(windows(1)[0], 1e-2, clip=1.0)
    killed_at = list[str]()
    while len(killed_at) < 20:
        calls = 0

        def until(real: Callable[..., Any], cut: int = len(killed_at) + 1) -> Callable[..., Any]:
            def act(*given: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls < cut:
                    return real(*given)
                if real is save_file:  # half of it is written
                    real(*given)
                    os.truncate(given[1], given[1].stat().st_size // 2)
                killed_at.append(real.__name__)
                raise KeyboardInterrupt

            return act

        with monkeypatch.context() as patch:
            for where, name in ((snapshot, "save_file"), (snapshot, "_sync"), (os, "replace")):
                patch.setattr(where, name, until(getattr(where, name)))
            try:
                snapshots.write(2, optimizer, *written)
                break
            except KeyboardInterrupt:
                pass
        found = snapshots.latest()
        assert found is not None
        if killed_at[-2:] != ["replace", "_sync"]:  # whole once it has its name
            assert found.folder.name == "000000001"
            assert {path.name: path.read_bytes() for path in found.folder.iterdir()} == before
    assert killed_at == ["save_file", "_sync", "_sync", "_sync", "replace", "_sync"]
    found = snapshots.latest()
    assert found is not None
    assert found.folder.name == "000000002"


def test_20_adapters_that_training_goes_on_with_are_those_that_it_left(tmp_path: Path) -> None:
    """There the loss after a restart was that of fresh adapters."""
    house = House(tmp_path, rows=8, plan={"technique": {"method": "lora", "r": 4, "dropout": 0.0}})
    _, first = train(tmp_path / "first", house, evaluations=1, epochs=4.0)
    checkpoint = first.artifact("checkpoint")
    _, second = train(tmp_path / "second", house, more={"checkpoint": checkpoint}, evaluations=1, epochs=0.5)
    table, apart = TokenTable(house.artifacts["tokens"].folder), []
    for folder in (checkpoint.folder, None):
        model = load_merged(folder, house.pin)
        for row in second.rows("example_losses"):
            batch = collate([table.row(table.index_of(row["example_id"]))])
            with torch.no_grad():
                loss_D, _ = document_losses(model, batch)
            apart.append(abs(row["loss_sum"] - float(loss_D)))
    assert len(apart) == 8
    assert max(apart[:4]) < 1e-3
    assert min(apart[4:]) > 0.05


def test_24_no_window_of_an_epoch_holds_more_than_the_plan_for_its_longest_row(tmp_path: Path) -> None:
    places = (0, 1, 2)
    pin, method, longest = pinned(tmp_path / "model", 3), technique("full"), 20
    shape = Shape(method, "float32", longest, longest - 1, False)
    phases = Estimator(pin, TRAIN, "cpu").phases(shape, 2, 2, places)
    predicted = max(phase.total - phase.process for phase in phases.values())
    optimizer = started(method, pin)
    recompute(optimizer.model, places)
    states = [item for each in optimizer.stand().values() for item in each]
    stays = sum(item.nbytes for item in (*optimizer.model.parameters(), *optimizer.model.buffers(), *states))
    short = [replace(row, input_ids=row.input_ids[:8], answer_mask=row.answer_mask[:8]) for row in rows(10)]
    full = [Row(f"long{number}", np.arange(longest) + 2, np.ones(longest, dtype=bool)) for number in range(2)]
    order, epochs = [*short[:6], *full, *short[6:]], []
    for _ in range(2):
        windows_ = [[collate(order[at : at + 2]), collate(order[at + 2 : at + 4])] for at in range(0, 12, 4)]
        for window in windows_:
            assert all(batch.answers for batch in window)  # made when first asked for, and part of the batch
        epochs.append(
            [stays + handed_out(lambda given=window: optimizer.step(given, 1e-3, clip=1.0)) for window in windows_]
        )
    first, second = epochs
    assert first == second, "nothing is left over from step to step"
    assert max(first) == first[1] > max(first[0], first[2])
    assert 0.98 * predicted < first[1] <= predicted
