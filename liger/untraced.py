"""Calls that no graph can hold, kept from Dynamo: the graph breaks before them, and they run as if nothing were compiled.

To be imported while Dynamo traces and not before: marking a function imports Dynamo, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .checks import IN_PLACE_IS_TRACED, SPLIT_IS_TRACED
from .options import CrossEntropyOutput
from .run import run

# An error would end the trace of this frame only: Dynamo would go on with those that the call enters, down to the launches.
Run = Callable[..., CrossEntropyOutput]
run_in_place: Run = torch.compiler.disable(run, reason=IN_PLACE_IS_TRACED)  # type: ignore[no-untyped-call]
run_split: Run = torch.compiler.disable(run, reason=SPLIT_IS_TRACED)  # type: ignore[no-untyped-call]
