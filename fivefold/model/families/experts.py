"""What the families with mixtures of experts have in common."""

from __future__ import annotations

from fivefold.core.errors import WeightsError
from fivefold.model.config import MoEConfig


def check_experts(moe: MoEConfig) -> None:
    """Raise WeightsError where the numbers of experts, groups and choices do not fit together."""
    if moe.experts % moe.groups:
        raise WeightsError(
            f"{moe.experts} experts do not divide into {moe.groups} groups (n_group)",
            "mend one of the two in the model's config",
        )
    if moe.top_groups > moe.groups:
        raise WeightsError(
            f"topk_group={moe.top_groups} is more than the {moe.groups} groups (n_group)",
            "mend one of the two in the model's config",
        )
    open_to_choice = moe.experts // moe.groups * moe.top_groups
    if moe.top_k > open_to_choice:
        raise WeightsError(
            f"num_experts_per_tok={moe.top_k} is more than the {open_to_choice} experts "
            "that there are to choose from",
            "mend one of the two in the model's config",
        )
    if moe.group_score == "top2" and moe.experts // moe.groups < 2:
        raise WeightsError(
            f"groups are told by their two best experts, but {moe.experts} experts in "
            f"{moe.groups} groups leave {moe.experts // moe.groups} in each",
            "use fewer groups (n_group)",
        )
