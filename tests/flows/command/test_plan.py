"""What `lazytrain plan` says that a run would cost."""

from __future__ import annotations

import pytest

from data_contracts.records import Ref
from flows.command.plan import steps_table
from flows.readable import text
from flows.workspace import Workspace
from tests.flows.small_run import lay_out
from tests.flows.test_race import plan_of

pytestmark = pytest.mark.shared


@pytest.mark.parametrize(
    ("begin", "expected"), [({"fraction": 0.3}, 300), ({"fraction": 0.01}, 200), ({"least_rows": 100}, 1000)]
)
def test_the_warm_up_is_one_pass_over_its_own_rows_whatever_a_segment_makes(tmp_path, shared, begin, expected):
    workspace = Workspace.read(lay_out(tmp_path, shared, begin=begin, train={"epochs": 3.0}))
    pool = Ref(contract="tokens/1", run="r", path="pool_tokens", digest="d", rows=40)
    rows = {row[0].split(" ")[1]: row[1] for row in steps_table(plan_of(1000), workspace, pool).rows[:3]}
    assert rows["warm-up"] == text(expected)
    assert rows["segment"] == text(1200)  # 40 % of the pool, three times
