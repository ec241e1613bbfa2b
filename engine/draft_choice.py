"""Which draft head a worker runs: a directory with one, or the MTP module that the target's checkpoint carries."""

from pathlib import Path

from graftline.engine.config import MTP_HEAD, EngineConfig
from graftline.engine.draft_head.config import FINAL_NORM, DraftHeadConfig, DraftHeadKind, read_draft_head_config
from graftline.engine.models.checkpoint import open_checkpoint, read_model_config
from graftline.engine.models.config import ModelConfig
from graftline.errors import InvalidRequestError


def chosen_head(config: EngineConfig, model: ModelConfig) -> DraftHeadConfig | None:
    """The head of a configuration; None when nothing is drafted.

    Raises:
        InvalidRequestError: an unreadable head, or a target that has no MTP module.
    """
    if not config.tree.speculates or config.draft_head is None:
        return None
    return head_named(config.draft_head, model)


def head_named(name: str, model: ModelConfig) -> DraftHeadConfig:
    """The head in a directory, or the target's own one.

    Raises:
        InvalidRequestError: see `chosen_head`.
    """
    return mtp_config(model) if name == MTP_HEAD else read_draft_head_config(Path(name))


def mtp_config(model: ModelConfig) -> DraftHeadConfig:
    """What an MTP module of this target looks like: one of its attention layers, over its embedding and head.

    Raises:
        InvalidRequestError: a family without MTP modules.
    """
    if model.hybrid is None:
        raise InvalidRequestError("draft_head", f"models of the family {model.family.value} have no MTP module")
    moe = model.hybrid.moe
    return DraftHeadConfig(
        kind=DraftHeadKind.MTP,
        hidden_size=model.hidden_size,
        target_hidden_size=model.hidden_size,
        intermediate_size=moe.num_chosen * moe.expert_size + moe.shared_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        draft_vocab_size=model.vocab_size,
        feature_layers=(FINAL_NORM,),
        rms_norm_eps=model.rms_norm_eps,
        rope_theta=model.rope.theta,
        context_length=model.context_length,
    )


def carries_mtp(path: Path) -> bool:
    """Whether a model brings an MTP module along; a bare config, to be planned for, counts as what is published."""
    if read_model_config(path).hybrid is None:
        return False
    try:
        return open_checkpoint(path).has_tensor("mtp.fc.weight")
    except InvalidRequestError:
        return True
