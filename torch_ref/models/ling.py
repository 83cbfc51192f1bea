"""Ling 3 in plain PyTorch, with the keys of transformers."""

__all__ = ["LingLanguageModel"]

from typing import Any

from torch_ref.models.kimi_linear import KimiLinearLanguageModel


class LingLanguageModel(KimiLinearLanguageModel):
    """Kimi Linear with bounded decays, and with positions and gates in the latent attention."""

    @staticmethod
    def delta_options(config: Any) -> dict[str, Any]:
        return {"low_rank": False, "min_log_decay": config.min_log_decay}

    @staticmethod
    def latent_options(config: Any) -> dict[str, Any]:
        return {"rope_theta": config.rope_theta, "output_gate": True}
