"""A tiny target, trained for a moment so that its text has structure a head can learn."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from graftline.engine.models.random import write_tiny_model

ROW_LEN = 144
PHRASES = (
    "the cat sat on the mat and looked at the moon.",
    "one two three four five six seven eight nine ten.",
    "a small boat went over the sea to the far land.",
    "call get_weather with the city and the date.",
)


def learn_phrases(folder: Path, steps: int) -> None:
    """Train the target's own weights on a few phrases in its dialog format."""
    from transformers import LlamaForCausalLM

    from graftline.engine.draft_head.dialogs import DialogWriter
    from graftline.engine.models.checkpoint import open_checkpoint

    writer = DialogWriter(open_checkpoint(folder).card)
    model = LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    rows = []
    for number in range(8):
        text = writer.prompt_ids([{"role": "user", "content": PHRASES[number % 4]}])
        for turn in range(4):
            text += writer.encode(PHRASES[(number + turn) % 4] + "<|im_end|>\n<|im_start|>user\n")
            text += writer.encode(PHRASES[(number // 4 + turn) % 4] + "<|im_end|>\n<|im_start|>assistant\n")
        rows.append(text[:ROW_LEN])
    tokens = torch.tensor(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        logits = model(tokens[:, :-1]).logits
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    stored = load_file(folder / "model.safetensors")
    save_file({name: trained[name] for name in stored}, folder / "model.safetensors")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a byte-level Llama that has learnt a few phrases."""
    torch.manual_seed(0)
    folder = write_tiny_model(tmp_path_factory.mktemp("target") / "tiny", layers=2, hidden=32, scale=1.0, context=256)
    learn_phrases(folder, steps=60)
    return folder
