"""What the torch twins do beside their equations."""

import pytest
import torch

import torch_ref
from parity_tests.registry import CASES

LANGUAGE_MODELS = [name for name in CASES if "LanguageModel" in name or "GPModel" in name]


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_text_goes_on_from_the_state(name):
    """As if the whole text, or as much as the model knows, were read for each token."""
    twin = CASES[name].build_twin().eval()
    prompt = text = torch.tensor(CASES[name].inputs(time=4))
    for _ in range(14):  # beyond every context
        window = text if twin.context_length is None else text[:, -twin.context_length :]
        text = torch.cat([text, twin(window)[0][:, -1:].argmax(-1)], dim=1)
    found = torch_ref.generate(twin, prompt, 14, temperature=0)
    assert torch.equal(found, text[:, 4:])
